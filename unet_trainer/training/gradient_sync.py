"""Gradients of the processes of a torchrun job, averaged by torch's own engine. Imported only there."""

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from unet_trainer.system.distributed import Job
from unet_trainer.training.step import TrainStep


class GradientSync:
    """DistributedDataParallel around the forward pass of a step. It averages the gradients over the processes within
    the last backward pass of a group, while that still runs; what they have to know of each other's step follows in one
    small sum.

    A process that has begun a step owes the others its part of every sum, even if it fails: see `finish_in_vain`.
    """

    def __init__(
        self,
        processes: Job,
        step: TrainStep,
        batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        compression: Literal["none", "bf16"] = "none",
    ) -> None:
        """For the parameters that have gradients now, which are dropped. All processes at once: they compare shapes and
        strides.
        `batch`: what the forward pass takes, for two steps in vain, which change statistics."""
        self.processes, self.compression = processes, compression
        # Of the loss, so that the sum over the processes is their average: to divide gradients takes a pass over all of
        # them.
        self.divisor = 1 if compression == "bf16" else processes.launch.world_size
        self.faults = torch.zeros(2, device=step.device)  # as FiniteGuard.faults has them
        self.is_owed = False
        self.num_reduced = 0  # buckets of gradients, in this step
        self.trains = [parameter.requires_grad for parameter in step.parameters]
        self.buckets: dict[torch.Tensor, torch.Tensor] = {}
        self.empty = self.buckets  # those that no compiled pass has filled yet, in this step
        model = _StepForward(step)
        without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, without)
        step.optimizer.zero_grad(set_to_none=True)
        with processes.exchange(), warnings.catch_warnings():
            # broadcast_buffers has another name since torch 2.13; gradients of 1×1 kernels have strides of their own.
            warnings.simplefilter("ignore")
            self.model = DistributedDataParallel(
                model, process_group=processes.gradient_group, broadcast_buffers=False, gradient_as_bucket_view=True
            )
            self.model.register_comm_hook(self, lambda sync, bucket: sync._reduce(bucket))
            for _ in range(
                2
            ):  # it arranges its buckets after the first: a run that is resumed adds up in the same order
                self(*batch, is_last=True)[0].backward()
        self.buckets = {
            weight: weight.grad for weight in step.parameters if weight.grad is not None
        }  # each one's place in them
        step.optimizer.zero_grad(set_to_none=True)

    def close(self) -> None:
        """The parameters may get another."""
        self.model.reducer._remove_autograd_hooks()
        del self.model, self.buckets, self.empty  # they hold each other

    def prepare_compiler(self) -> None:
        """Of several processes the backward pass is compiled in parts, a bucket each: one is averaged while the next is
        computed. As a whole it is faster by itself."""
        torch._dynamo.config.optimize_ddp = self.processes.launch.world_size > 1

    def begin_step(self) -> None:
        self.is_owed, self.num_reduced = True, 0

    def __call__(self, *batch: torch.Tensor | None, is_last: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The step's forward pass; gradients are averaged in the backward pass of the last one of a group."""
        with contextlib.nullcontext() if is_last else self.model.no_sync():
            loss, counts = self.model(*batch)
        if is_last:
            self.empty = dict(self.buckets)
            for node in _compiled_passes(loss.grad_fn):
                node.register_hook(partial(self._fill_buckets, [edge[0] for edge in node.next_functions]))
        return loss, counts

    def _fill_buckets(
        self, takers: list[Any], gradients: tuple[torch.Tensor | None, ...], _: object
    ) -> tuple[Any, ...]:
        """Copies what a compiled pass has computed at once: DistributedDataParallel would do it one by one, in 140
        launches."""
        taken, places, values = list(gradients), [], []
        for index, (taker, gradient) in enumerate(zip(takers, gradients, strict=True)):
            weight = getattr(taker, "variable", None)
            if gradient is None or weight is None or weight.grad is not None:  # which is added to
                continue
            place = self.empty.pop(weight, None)
            if place is None:  # of a weight in two passes: autograd adds up
                continue
            taken[index] = place.detach()  # a tensor that nobody else holds is not copied again
            if place.stride() == gradient.stride():
                places.append(place)
                values.append(gradient)
            else:  # 1×1 kernels, and others of another layout: together they would slow down all
                place.copy_(gradient)
        if places:
            torch._foreach_copy_(places, values)
        return tuple(taken)

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        group = self.processes.gradient_group
        if self.compression == "bf16":  # which divides
            future = bf16_compress_hook(group, bucket)
        else:
            work = torch.distributed.all_reduce(bucket.buffer(), group=group, async_op=True)
            future = work.get_future().then(lambda done: done.value()[0])
        self.num_reduced += 1  # not before: it may have failed for want of memory
        return future

    def average_faults(self) -> None:
        """Never recorded: NCCL has a stream and a watchdog of its own."""
        self.is_owed = False
        self.processes.all_reduce_mean(self.faults)

    @torch.no_grad()
    def finish_in_vain(self) -> None:
        """Gives the others what they wait for, with a fault: their step changes nothing."""
        with self.processes.exchange():
            buckets = self.model.reducer._get_zeros_like_grad_buckets()
            for future in [self._reduce(bucket) for bucket in buckets[self.num_reduced :]]:
                future.wait()
        self.faults.fill_(1.0)
        self.average_faults()


def _compiled_passes(node: Any) -> Iterator[Any]:
    """The backward passes that lead from this node to the weights; none of a step that is not compiled."""
    seen, open_nodes = set(), [node]
    while open_nodes:
        node = open_nodes.pop()
        if node is not None and node not in seen and node.name() == "CompiledFunctionBackward":
            seen.add(node)
            open_nodes += [one for one, _ in node.next_functions]
            yield node


class _StepForward(torch.nn.Module):
    """What DistributedDataParallel wraps. The step's forward pass may become a compiled one, and uncompiled again."""

    def __init__(self, step: TrainStep) -> None:
        super().__init__()
        self.network = step.segmenter.network
        self.step = step

    def forward(self, *batch: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.step.forward(*batch)  # type: ignore[arg-type]
