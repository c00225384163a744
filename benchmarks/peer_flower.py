"""Flower: run_simulation with its Message API on Ray, two actors of one thread each; runs in the environment `flw`."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from measure import Clock
from torch.utils.data import DataLoader, TensorDataset
from workloads import LR, kept, make_model, workload

NAME = sys.argv[1]
W = workload(NAME)
CPUS = {
    "init_args": {"num_cpus": 2, "log_to_driver": False, "logging_level": "error"},
    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
}
clients, server = ClientApp(), ServerApp()


@clients.train()
def train(message: Message, context: Context) -> Message:
    xs, ys, model = kept(NAME)
    client = int(context.node_config["partition-id"])
    samples = TensorDataset(torch.from_numpy(xs[client]), torch.from_numpy(ys[client]))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loader = DataLoader(samples, batch_size=W.batch, shuffle=True)
    for _ in range(W.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    trained = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(samples)})}
    return Message(RecordDict(trained), reply_to=message)


class TimedFedAvg(FedAvg):
    """Flower's own, with a clock; a round in which a client failed is no measurement."""

    clock = Clock(NAME)

    def configure_train(self, server_round, arrays, config, grid):
        if server_round == 1:
            self.clock.start()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        if len(replies) != W.cohort or any(reply.has_error() for reply in replies):
            raise SystemExit("a client failed")
        return super().aggregate_train(server_round, replies)

    def configure_evaluate(self, server_round, arrays, config, grid):
        self.clock.tick()
        if server_round == W.rounds:
            self.clock.report("flwr", "ray")
        return super().configure_evaluate(server_round, arrays, config, grid)


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = TimedFedAvg(fraction_train=W.cohort / W.clients, fraction_evaluate=0.0, min_available_nodes=W.clients)
    strategy.start(grid, ArrayRecord(make_model(NAME).state_dict()), num_rounds=W.rounds)


if __name__ == "__main__":
    run_simulation(server, clients, num_supernodes=W.clients, backend_config=CPUS)
