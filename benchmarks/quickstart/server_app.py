"""Flower's FedAvg, which notes when its rounds end."""

import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from task import build

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.set_num_threads(1)
    times = Path(str(context.run_config["times"]))

    def note(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        with times.open("a") as file:
            file.write(f"{server_round} {time.time()}\n")
        return MetricRecord({"round": server_round})

    rounds, sites = int(context.run_config["rounds"]), int(context.run_config["sites"])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(build().state_dict()), num_rounds=rounds, evaluate_fn=note)
