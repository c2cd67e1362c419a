"""What the rooms share: hardware facts, kernels' plumbing, files, measuring, reports. It imports no room."""
