"""A step of training: the model's states, the loss, its gradient and the update, on a GPU as one CUDA graph."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from muon import Muon
from small_model import schedule
from target import Target
from torch import Tensor

WARM_UP = 3
"""Steps before a graph is captured, so that everything is compiled and allocated."""


class Step:
    """Called with windows [batch, context] int64 and how far the training is; `loss` is the last one's, on the device.

    Args:
        options: device, batch, context, optimizer, lr, weight_decay, autocast, compile, graph.
    """

    def __init__(self, trainer: Any, target: Target, options: argparse.Namespace) -> None:
        self._trainer, self._target, self._device = trainer, target, torch.device(options.device)
        self._windows = torch.zeros(options.batch, options.context, dtype=torch.int64, device=self._device)
        self._lr, self._progress, self.loss = (torch.zeros((), device=self._device) for _ in range(3))
        self._peak, self._autocast = options.lr, options.autocast
        self._optimizers = optimizers_of(trainer, self._lr, options)
        cuda = self._device.type == "cuda"
        self._loss_of = torch.compile(trainer.loss, dynamic=False) if options.compile else trainer.loss
        self._states_of = torch.compile(target.states, dynamic=False) if options.compile else target.states
        self._graph = torch.cuda.CUDAGraph() if options.graph and cuda else None
        if self._graph is not None:
            self._capture()
        elif cuda:
            self._run()  # compiles

    def __call__(self, windows: Tensor, progress: float) -> None:
        """Update the trainer once; `progress` rises from 0 to 1."""
        self._windows.copy_(windows)
        self._lr.fill_(self._peak * schedule(progress))
        self._progress.fill_(progress)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._run()

    def _capture(self) -> None:
        """Record the step; those before it see no text, and run at a learning rate of zero."""
        assert self._graph is not None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self._graph):
            self._run()

    def _run(self) -> None:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            loss = self._loss_of(self._target, self._windows, *self._states_of(self._windows), self._progress)
        torch.autograd.backward(loss)
        parameters = list(self._trainer.parameters())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        for parameter in parameters:
            parameter.grad.zero_()  # in place: a graph keeps the addresses
        self.loss.copy_(loss.detach())


def optimizers_of(trainer: Any, lr: Tensor, options: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """One for matrices and one for the rest, or one for all, which read their learning rate from a tensor []."""
    muon, cuda = options.optimizer == "muon", options.device != "cpu"
    decayed, others = list[Tensor](), list[Tensor]()
    for name, parameter in trainer.named_parameters():
        matrix = parameter.ndim >= 2 and "bias" not in name and not (muon and "projections" in name)
        (decayed if matrix else others).append(parameter)
    groups = [{"params": others, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = []
    if muon:
        optimizers.append(Muon(decayed, lr=lr, weight_decay=options.weight_decay))
    else:
        groups.append({"params": decayed, "weight_decay": options.weight_decay})
    return [*optimizers, torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), capturable=cuda, fused=cuda)]
