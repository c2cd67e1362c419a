"""Published traces of clusters and services: one loader a file, and what their statistics say."""
