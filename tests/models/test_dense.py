"""The closed-form gradient of a fully connected network equals autograd's, however a loss uses the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedadc.models import MLP, FlatModel, Logistic
from fedadc.models.dense import dense_layers

torch.manual_seed(0)
X, Y = torch.randn(7, 5, dtype=torch.float64), torch.randint(3, (7,))
Model = Callable[[Tensor], Tensor]

CHAINS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP((5,), 3, [6, 4]),
    "mlp with projection": lambda: MLP((5,), 3, [6], projection=4),
    "logistic": lambda: Logistic((5,), 3),
    "sequential": lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)),
    "no bias, flatten, ReLU in place": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(5, 6, bias=False), nn.ReLU(inplace=True), nn.Linear(6, 4), nn.Linear(4, 3)
    ),
    "ReLU at the end": lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3), nn.ReLU()),
}


LOSSES: dict[str, Callable[[Model, nn.Module], Tensor]] = {
    "cross-entropy": lambda model, module: F.cross_entropy(model(X), Y),
    "called twice": lambda model, module: F.cross_entropy(model(X[:4]), Y[:4]) + model(X[4:]).square().sum(),
    "called once for nothing": lambda model, module: (model(X), F.cross_entropy(model(X[:2]), Y[:2]))[1],
    "a term in the parameters": lambda model, module: (
        F.cross_entropy(model(X), Y) + sum(p.square().sum() for p in module.parameters())
    ),
    "parameters alone": lambda model, module: next(p for p in module.parameters() if p.requires_grad).sum(),
    "a gradient of the inputs": lambda model, module: _input_gradient_norm(model),
}


def _input_gradient_norm(model: Model) -> Tensor:
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(model(x), Y), x, create_graph=True)
    return g.square().sum() + F.cross_entropy(model(X), Y)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("build", CHAINS.values(), ids=CHAINS)
def test_the_gradient_is_autograds(build: Callable[[], nn.Module], loss: Callable[[Model, nn.Module], Tensor]) -> None:
    torch.manual_seed(1)
    module = build().double()
    assert dense_layers(module)
    value = loss(module, module)
    value.backward()
    wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in module.named_parameters()}
    flat = FlatModel(module)
    for _ in range(2):
        flat.gradient.fill_(torch.nan)  # the old content of the buffer must not matter
        g, found = flat.gradient_of(lambda: loss(flat, flat.module), flat.theta)
    assert torch.allclose(found, value, rtol=1e-13)
    for name, view in flat._views(g).items():
        assert torch.allclose(view, wanted[name], rtol=1e-12, atol=1e-14), name


def test_a_loss_may_overwrite_the_logits() -> None:
    flat = FlatModel(CHAINS["mlp"]().double())
    once, _ = flat.gradient_of(lambda: F.cross_entropy(2 * flat(X), Y), flat.theta)
    kept = once.clone()
    assert torch.equal(kept, flat.gradient_of(lambda: F.cross_entropy(flat(X).mul_(2), Y), flat.theta)[0])


def test_predictions_are_the_modules() -> None:
    module = MLP((5,), 3, [6, 4]).double()
    with torch.no_grad():
        wanted = module(X)
    flat = FlatModel(module)
    assert torch.equal(flat.predict(flat.theta.clone(), X), wanted) and not flat(X).isnan().any()


class Doubled(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def half_frozen() -> nn.Module:
    module = MLP((5,), 3, [6, 4])
    for p in module.layers[0].parameters():
        p.requires_grad_(False)
    return module


def hooked() -> nn.Module:
    module = CHAINS["sequential"]()
    module[0].register_forward_hook(lambda m, inputs, output: 2 * output)
    return module


def tied() -> nn.Module:
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(5, 3))


def tied_weights() -> nn.Module:
    module = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    module[2].weight = module[0].weight
    return module


def patched() -> nn.Module:
    module = CHAINS["sequential"]()
    module[0].forward = lambda x: 2 * x.new_ones(len(x), 6)
    return module


def backward_hooked() -> nn.Module:
    module = CHAINS["sequential"]()
    module[2].register_full_backward_pre_hook(lambda m, g: (2 * g[0],))
    return module


def parameter_hooked() -> nn.Module:
    module = CHAINS["sequential"]()
    module[0].weight.register_hook(lambda g: 2 * g)
    return module


class Calling(nn.Sequential):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


def parametrized() -> nn.Module:
    module = CHAINS["sequential"]()
    nn.utils.parametrizations.weight_norm(module[0])
    return module


OTHERS: dict[str, nn.Module] = {
    "own forward": Doubled((5,), 3, [6]),
    "own call": Calling(nn.Linear(5, 3)),
    "hook": hooked(),
    "backward hook": backward_hooked(),
    "parameter hook": parameter_hooked(),
    "patched": patched(),
    "tied": tied(),
    "tied weights": tied_weights(),
    "frozen": half_frozen(),
    "parametrized": parametrized(),
    "tanh": nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)),
    "dropout": nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3)),
    "relu first": nn.Sequential(nn.ReLU(), nn.Linear(5, 3)),
    "another flatten": nn.Sequential(nn.Flatten(0), nn.Linear(5, 3)),
    "empty": nn.Sequential(),
}


@pytest.mark.parametrize("module", OTHERS.values(), ids=OTHERS)
def test_other_modules_are_left_to_autograd(module: nn.Module) -> None:
    assert dense_layers(module) == []


@pytest.mark.parametrize("build", [CHAINS["mlp"], lambda: OTHERS["tanh"]], ids=["by hand", "by autograd"])
def test_a_failure_does_not_affect_the_next_gradient(build: Callable[[], nn.Module]) -> None:
    flat = FlatModel(build().double())
    wanted = flat.gradient_of(lambda: F.cross_entropy(flat(X), Y), flat.theta)[0].clone()

    def interrupted() -> Tensor:
        F.cross_entropy(flat.module(X), Y).backward()
        flat(X)
        raise KeyboardInterrupt

    for attempt in (
        lambda: flat.gradient_of(interrupted, flat.theta),
        lambda: flat.gradient_from(lambda logits: (interrupted(), logits), X, flat.theta),
    ):
        with pytest.raises(KeyboardInterrupt):
            attempt()
        assert torch.equal(flat.gradient_of(lambda: F.cross_entropy(flat(X), Y), flat.theta)[0], wanted)
        assert not flat._calls


def test_outside_a_loss_a_dense_model_is_its_module() -> None:
    flat = FlatModel(CHAINS["mlp"]().double())
    F.cross_entropy(flat(X), Y).backward()
    assert all(p.grad is not None for p in flat.module.parameters()) and not flat._calls


def test_inputs_may_be_overwritten_after_a_call() -> None:
    flat = FlatModel(CHAINS["mlp"]().double())
    wanted = flat.gradient_of(lambda: F.cross_entropy(flat(X), Y), flat.theta)[0].clone()
    x = X.clone()

    def loss() -> Tensor:
        logits = flat(x)
        x.zero_()
        return F.cross_entropy(logits, Y)

    assert torch.equal(flat.gradient_of(loss, flat.theta)[0], wanted)
