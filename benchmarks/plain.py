"""What ours is measured against: `python benchmarks/plain.py W2 plain|limit`.

plain: the FedAvg loop that anybody would write, one process of two threads. limit: the same SGD steps with nothing
federated about them, two processes of one thread each, on batches that are ready; no copies, shuffling or averaging.
"""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from measure import Clock
from torch.utils.data import DataLoader, TensorDataset
from workloads import LR, load_tensors, make_model, workload


def plain(name: str) -> None:
    torch.set_num_threads(2)
    random.seed(1)
    w, clock = workload(name), Clock(name)
    xs, ys = load_tensors(name)
    model = make_model(name)
    clock.start()
    for _ in range(w.rounds):
        states = []
        for client in random.sample(range(w.clients), w.cohort):
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=LR)
            loader = DataLoader(TensorDataset(xs[client], ys[client]), batch_size=w.batch, shuffle=True)
            for _ in range(w.epochs):
                for x, y in loader:
                    optimizer.zero_grad()
                    F.cross_entropy(local(x), y).backward()
                    optimizer.step()
            states.append(local.state_dict())
        model.load_state_dict({key: torch.stack([s[key] for s in states]).mean(0) for key in states[0]})
        clock.tick()
    clock.report()


def _steps(name: str, steps: int, start: Any, done: Any) -> None:
    """One process of the limit: so many steps a round, client after client."""
    torch.set_num_threads(1)
    w = workload(name)
    xs, ys = load_tensors(name)
    model = make_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(w.rounds):
        start.wait()
        for step in range(steps):
            client, batch = divmod(step, w.samples // w.batch)
            rows = slice(batch * w.batch, (batch + 1) * w.batch)
            optimizer.zero_grad()
            F.cross_entropy(model(xs[client % w.clients][rows]), ys[client % w.clients][rows]).backward()
            optimizer.step()
        done.wait()
    start.wait()  # until the figures are taken


def limit(name: str, processes: int = 2) -> None:
    w, clock, spawn = workload(name), Clock(name), mp.get_context("spawn")
    start, done = spawn.Barrier(processes + 1), spawn.Barrier(processes + 1)
    steps = w.cohort * w.steps // processes
    workers = [spawn.Process(target=_steps, args=(name, steps, start, done)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    for number in range(w.rounds):
        start.wait()
        if number == 0:
            clock.start()
        done.wait()
        clock.tick()
    clock.report()
    start.wait()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    {"plain": plain, "limit": limit}[sys.argv[2]](sys.argv[1])
