"""FLOPs are those of torch's own counter, which need not be imported for them."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedadc.studies.flops import flops_of


def test_flops_are_those_of_torchs_own_counter() -> None:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 5)
    )
    x = torch.randn(4, 3, 8, 8)

    def training() -> None:
        net(x).sum().backward()

    def evaluation() -> None:
        with torch.inference_mode():
            net(x)
        with torch.no_grad():
            torch.nn.functional.linear(torch.randn(4, 2, 3), torch.randn(6, 3))

    for call in (training, evaluation):
        with FlopCounterMode(display=False) as torchs:
            call()
        assert flops_of(call) == torchs.get_total_flops() > 0
    assert flops_of(lambda: torch.ones(10).sum()) == 0


def test_no_compiler_is_imported() -> None:
    code = (
        "import sys, torch; from fedadc.studies.flops import flops_of\n"
        "assert flops_of(lambda: torch.ones(2, 2) @ torch.ones(2, 2)) == 16\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
