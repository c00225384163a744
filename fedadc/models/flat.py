"""A module whose trainable parameters are views of one flat vector, and whose gradients go to another.

Every update of a method is then one vector operation, a message is one vector, and loading a client's start is one
copy. Frozen parameters stay out of the vector; tied weights have one slot; the head's parameters come last, so that
`part("head")` is one slice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedadc.errors import FedadcError, require
from fedadc.models.dense import Dense, Values, dense_layers

Derivative = Callable[[Tensor], tuple[Tensor, Tensor]]  # of logits: a loss, and its derivative with respect to them


class FlatModel:
    """`theta` and `gradient` are the flat buffers; calling the model runs it at the present `theta`.

    The module is taken over: its parameters become views of `theta`.
    """

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        self.module = module.to(device).train()
        head = {id(p) for p in getattr(self.module, "head", nn.Module()).parameters()}
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        named.sort(key=lambda item: id(item[1]) in head)  # stable: the head last, all else as it was
        require(bool(named), f"{type(module).__name__} has no parameter to train: all of them are frozen.")
        kinds = {p.dtype for _, p in named}
        require(
            len(kinds) == 1 and next(iter(kinds)).is_floating_point,
            f"{type(module).__name__} mixes parameters of {', '.join(sorted(map(str, kinds)))}; "
            "one floating-point type is needed for one flat vector.",
        )
        self.theta = torch.cat([p.detach().reshape(-1) for _, p in named])
        self.gradient = torch.zeros_like(self.theta)
        self._slots: list[tuple[str, int, torch.Size]] = []
        self._gradients: dict[Tensor, Tensor] = {}  # where each parameter's belongs
        places: dict[Tensor, slice] = {}
        start = 0
        for name, p in named:
            places[p] = view = slice(start, start + p.numel())
            p.data, p.grad = self.theta[view].view(p.shape), None
            self._gradients[p] = self.gradient[view].view(p.shape)
            self._slots.append((name, start, p.shape))
            start = view.stop
        layers = dense_layers(self.module)
        self._dense = Dense(layers, places, self.theta, self.gradient) if layers else None
        self._recording = False  # whether a loss is being worked on
        self._calls: list[tuple[Values, Tensor]] = []  # of a dense model in it: values and logits
        self._head_size = sum(p.numel() for _, p in named if id(p) in head)

    @property
    def device(self) -> torch.device:
        return self.theta.device

    @property
    def dtype(self) -> torch.dtype:
        return self.theta.dtype

    def fixed(self) -> dict[str, Tensor]:
        """What the module has beside theta: frozen parameters, and buffers."""
        frozen = {name: p for name, p in self.module.named_parameters() if not p.requires_grad}
        return {**frozen, **dict(self.module.named_buffers())}

    def __call__(self, x: Tensor) -> Tensor:
        """Logits at the present theta, in training mode, with gradients.

        While `gradient_of` works on a loss, those of a dense model have no graph behind them; `model.module(x)` has.
        """
        by_hand = self._dense is not None and self._recording and torch.is_grad_enabled()
        if not by_hand or x.requires_grad or torch.is_autocast_enabled(x.device.type):
            output: Tensor = self.module(x)
            return output
        assert self._dense is not None
        values = self._dense.forward(x.clone())  # which the loss may overwrite
        logits = values[-1].detach().requires_grad_()  # the graph of a loss begins here
        self._calls.append((values, logits))
        return logits.clone()  # which a loss may overwrite

    def gradient_of(self, loss: Callable[[], Tensor], theta: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of a loss at theta, and the loss. The gradient is overwritten by the next call."""
        with self._at(theta), self._record():
            value = loss()
            require(
                isinstance(value, Tensor) and value.ndim == 0 and value.requires_grad,
                "an objective must return one number that depends on model(x): a scalar tensor with a gradient.",
            )
            value.backward()  # type: ignore[no-untyped-call]
            self._collect()
        return self.gradient, value.detach()

    def gradient_from(self, derivative: Derivative, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The same for a loss of the logits of x whose derivative is known."""
        with self._at(theta):
            if self._dense is not None:
                values = self._dense.forward(x)
                loss, d = derivative(values[-1])
                self._dense.backward(values, d)
            else:
                with self._record():
                    logits = self(x)
                    loss, d = derivative(logits.detach())
                    logits.backward(d)  # type: ignore[no-untyped-call]
                    self._collect()
        return self.gradient, loss

    @contextmanager
    def _record(self) -> Iterator[None]:
        """Gradients from here on are this loss's; nothing stays behind, whatever happens."""
        self._forget()
        self._recording = True
        try:
            yield
        finally:
            self._recording = False
            self._forget()

    def _forget(self) -> None:
        self._calls.clear()
        for p in self._gradients:
            p.grad = None

    def _collect(self) -> None:
        """Put the gradients together: a dense model's in closed form, and what autograd left at the parameters."""
        heard = [(values, logits.grad) for values, logits in self._calls if logits.grad is not None]
        if self._dense is not None and heard:
            self._dense.backward(*(heard[0] if len(heard) == 1 else _as_one(heard)))
        for p, gradient in self._gradients.items():
            if p.grad is not None:
                gradient.add_(p.grad) if heard else gradient.copy_(p.grad)
            elif not heard:
                gradient.zero_()

    def embed(self, x: Tensor) -> Tensor:
        """Features at the present theta, in training mode, with gradients; `head` makes logits of them."""
        features: Tensor = self.module.embed(x)  # type: ignore[operator]
        return features

    def head(self, features: Tensor) -> Tensor:
        logits: Tensor = self.module.head(features)  # type: ignore[operator]
        return logits

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        """Logits of a frozen model: theta's, in evaluation mode, without gradients."""
        if self._dense is not None:
            with torch.no_grad():
                return self._dense.forward(x, theta)[-1]
        with self._frozen(theta):
            return self(x).clone()  # a module may return a view of a parameter

    def features(self, theta: Tensor, x: Tensor) -> Tensor:
        """Features of a frozen model."""
        if self._dense is not None and self._head_size:  # then the head is the last layer
            with torch.no_grad():
                return self._dense.forward(x, None if theta is self.theta else theta)[-2]
        with self._frozen(theta):
            return self.embed(x).clone()

    def is_head_of_embed(self, x: Tensor) -> bool:
        """Whether forward(x) is head(embed(x)), as it should be."""
        with self._frozen(self.theta):
            return torch.allclose(self(x), self.head(self.embed(x)), atol=1e-4)

    @contextmanager
    def _frozen(self, theta: Tensor) -> Iterator[None]:
        self.module.eval()
        try:
            with self._at(theta), torch.no_grad():
                yield
        finally:
            self.module.train()

    @contextmanager
    def _at(self, theta: Tensor) -> Iterator[None]:
        """Work at another point, and come back."""
        if theta is self.theta:
            yield
            return
        present = self.theta.clone()
        self.theta.copy_(theta)
        try:
            yield
        finally:
            self.theta.copy_(present)

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in one of the flat buffers, which the next client overwrites."""
        storage = tensor.untyped_storage().data_ptr()
        return storage in (self.theta.untyped_storage().data_ptr(), self.gradient.untyped_storage().data_ptr())

    def on(self, device: torch.device) -> FlatModel:
        """The same there; this one is taken over."""
        return self if self.device == device else FlatModel(self.module, device)

    def __reduce__(self) -> tuple[type[FlatModel], tuple[nn.Module, torch.device]]:
        """Each parameter by itself: pickled as a view, it would take the whole vector along."""
        return FlatModel, (copy.deepcopy(self.module).cpu(), self.device)

    def part(self, name: str) -> slice:
        """The slice of theta that holds a part of the model: "head" (the classifier) or "embed" (all before it)."""
        require(name in ("embed", "head"), f"a model has the parts 'embed' and 'head', not {name!r}.")
        require(
            self._head_size > 0 and hasattr(self.module, "embed"),
            f"{type(self.module).__name__} has no split into `embed` and `head`; give it a method `embed(x)` and "
            "a module `head`, so that forward(x) is head(embed(x)).",
        )
        cut = self.theta.numel() - self._head_size
        return slice(cut, None) if name == "head" else slice(0, cut)

    def state_dict(self, theta: Tensor) -> dict[str, Tensor]:
        """The module's own state dict with theta in place, every entry a tensor of its own."""
        views = self._views(theta)
        slot = {id(p): views[n] for n, p in self.module.named_parameters() if n in views}
        tied = {n: slot[id(p)] for n, p in self.module.named_parameters(remove_duplicate=False) if id(p) in slot}
        state = self.module.state_dict()
        return {n: tied.get(n, t).detach().clone().contiguous().cpu() for n, t in state.items()}

    def load_state_dict(self, state: dict[str, Tensor], source: str) -> None:
        """Take over the weights of a state dict; the flat buffers stay where they are."""
        wanted = self.module.state_dict()
        missing, extra = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
        both = sorted(wanted.keys() & state.keys())
        shape = [n for n in both if wanted[n].shape != state[n].shape]
        kind = [n for n in both if wanted[n].is_floating_point() != state[n].is_floating_point()]
        large = [n for n in both if not torch.isfinite(state[n].to(wanted[n].dtype)).all()]
        for names, what in (
            (missing, "lacks"),
            (extra, "has besides"),
            (shape, "has with another shape"),
            (kind, "has in another kind of number"),
            (large, "has with numbers too large for the model's type"),
        ):
            if names:
                raise FedadcError(
                    f"{source} does not fit {type(self.module).__name__}: it {what} {', '.join(names[:3])}"
                    f"{' and more' if len(names) > 3 else ''}."
                )
        with torch.no_grad():
            for name, tensor in wanted.items():
                tensor.copy_(state[name])

    def _views(self, theta: Tensor) -> dict[str, Tensor]:
        return {name: theta[start : start + shape.numel()].view(shape) for name, start, shape in self._slots}


def _as_one(calls: list[tuple[Values, Tensor]]) -> tuple[Values, Tensor]:
    """Several calls are one on all their samples."""
    values, gradients = zip(*calls, strict=True)
    return [torch.cat(parts) for parts in zip(*values, strict=True)], torch.cat(gradients)
