"""Where gradients are caught: DDP's communication hook, hooks of the parameters themselves, and FSDP's all-reduce hook.

All hand their gradients to one thread a rank, which exchanges them in the order in which they come while back-propagation
goes on. Ranks must therefore produce gradients in the same order; parameters that get none count as zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

if TYPE_CHECKING:
    from gossamer.train._exchanger import GradientExchanger


class Issuer:
    """One thread that runs exchanges in order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gossamer-exchange")

    def submit(self, exchanger: GradientExchanger, *arguments: Any) -> Future[Tensor]:
        """Queue ``exchanger.exchange(*arguments)``."""
        return self._thread.submit(exchanger.exchange, *arguments)


def ddp_hook(exchanger: GradientExchanger, model: nn.Module) -> Any:
    """A hook for ``DistributedDataParallel.register_comm_hook(exchanger, hook)``.

    model: the module that DDP wraps; its parameters' names are the residuals' keys.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    issuer = Issuer()

    def hook(state: GradientExchanger, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        parameters = bucket.parameters()
        keys, sizes = (
            [names[id(parameter)] for parameter in parameters],
            [parameter.numel() for parameter in parameters],
        )
        promised: torch.futures.Future[Tensor] = torch.futures.Future()
        running = issuer.submit(state, bucket.buffer(), keys, sizes)
        last = bucket.is_last()

        def deliver(done: Future[Tensor]) -> None:
            error = done.exception()
            if error is not None:
                promised.set_exception(error)  # type: ignore[arg-type]
                return
            if last:
                state.step += 1
            promised.set_result(done.result())

        running.add_done_callback(deliver)
        return promised

    # DDP compares the annotations themselves, which here are strings.
    hook.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[Tensor]})
    return hook


class NativeHooks:
    """Exchanges a model's gradients group by group as soon as they are there, without DDP.

    groups: names of parameters that are exchanged together, in the order in which back-propagation reaches them; every
        parameter that wants a gradient belongs to exactly one. If not given, each parameter is a group of its own, last
        first.

    Call :meth:`finish` after the last backward pass of a step, or give ``optimizer`` and it is called before its step.
    Groups are exchanged in the given order on every rank, whatever order their gradients come in.

    Raises:
        ValueError: a group names an unknown parameter, or a parameter is in no group or in two.
    """

    def __init__(
        self,
        model: nn.Module,
        exchanger: GradientExchanger,
        optimizer: torch.optim.Optimizer | None = None,
        groups: Sequence[Sequence[str]] | None = None,
    ) -> None:
        self.exchanger = exchanger
        wanted = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.groups = (
            [tuple(group) for group in groups] if groups is not None else [(name,) for name in reversed(wanted)]
        )
        listed = [name for group in self.groups for name in group]
        if sorted(listed) != sorted(wanted):
            wrong = sorted(set(listed) ^ set(wanted)) or sorted({name for name in listed if listed.count(name) > 1})
            raise ValueError(f"groups must hold every parameter that wants a gradient exactly once; see {wrong[:5]}")
        self._parameters = wanted
        self._issuer = Issuer()
        self._running: list[Future[Tensor]] = []
        self._missing = [len(group) for group in self.groups]
        self._ready: set[str] = set()
        self._accumulating = False
        group_of = {name: number for number, group in enumerate(self.groups) for name in group}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._arrival(name, group_of[name]))
            for name, parameter in wanted.items()
        ]
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self.finish()))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the one after the block exchanges the sums."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def finish(self) -> None:
        """Exchange what is left, wait for all, and put the averages into the parameters' ``grad``.

        Raises:
            NonFiniteGradients: on all ranks, if some rank's gradients hold NaN or Inf.
        """
        self._issue(len(self.groups))
        running, self._running = self._running, []
        self._missing = [len(group) for group in self.groups]
        self._ready.clear()
        averages = [future.result() for future in running]
        for group, average in zip(self.groups, averages, strict=True):
            members = [self._parameters[name] for name in group]
            for parameter, part in zip(members, average.split([member.numel() for member in members]), strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(part.view_as(parameter))
        self.exchanger.step += 1

    def remove(self) -> None:
        """Take all hooks off the model and the optimizer."""
        for handle in self._handles:
            handle.remove()

    def _arrival(self, name: str, group: int) -> Any:
        def hook(parameter: Tensor) -> None:
            if self._accumulating or name in self._ready:
                return
            self._ready.add(name)
            self._missing[group] -= 1
            while len(self._running) < len(self.groups) and not self._missing[len(self._running)]:
                self._issue(len(self._running) + 1)

        return hook

    def _issue(self, until: int) -> None:
        """Queue the exchange of all groups before ``until`` that are not queued yet."""
        for group in self.groups[len(self._running) : until]:
            members = [self._parameters[name] for name in group]
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in members]
            flat = torch.cat([part.detach().reshape(-1) for part in parts])
            self._running.append(self._issuer.submit(self.exchanger, flat, group, [p.numel() for p in members]))


def fsdp_hook(exchanger: GradientExchanger, name: str) -> Any:
    """A hook for ``FSDPModule.set_all_reduce_hook``: the exchange between replicas of one shard.

    Within a replica gradients are reduce-scattered densely by FSDP; the exchanger's transport joins the ranks that hold
    the same shard. name: the module's, the key of its residual.
    """

    def hook(shard: Tensor) -> None:
        shard.copy_(exchanger.exchange(shard, [name], [shard.numel()]))

    return hook
