"""A module whose trainable parameters are views of one flat vector and whose gradients are written to another.

An update of a method is then one vector operation, a message is one vector, and loading a model is one copy. Frozen
parameters are not in the vector; tied weights have one slot; the head's parameters come last, so `part("head")` is one
slice. With `norms_first`, BatchNorm layers come first: their running statistics, which are buffers, then their weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedadc.errors import FedadcError, require
from fedadc.models.dense import Dense, Values, dense_layers
from fedadc.models.parts import batch_norms, counters, input_of, layer_named, running_statistics

Derivative = Callable[[Tensor], tuple[Tensor, Tensor]]  # logits -> a loss, and its derivative with respect to them


class FlatModel:
    """`theta` and `gradient` are the flat buffers; calling the model runs it at the current `theta`.

    The module is modified: its parameters become views of `theta`.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str = "cpu",
        head: str | None = None,  # the layer whose output is the logits; None: the module's `head`, if it has `embed`
        norms_first: bool = False,  # BatchNorm layers with their statistics begin theta
    ) -> None:
        self.module = module.to(device).train()
        self._named_head, self._norms_first = head, norms_first
        layer = getattr(self.module, "head", nn.Module()) if head is None else layer_named(self.module, head)
        in_head = {id(p) for p in layer.parameters()}
        norms = batch_norms(self.module) if norms_first else []
        in_norms = {id(p) for layer in norms for p in layer.parameters(recurse=False)}
        in_head -= in_norms
        named: list[tuple[str, Tensor]] = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        require(bool(named), f"{type(module).__name__} has no trainable parameters: all of them are frozen.")
        # stable: those of BatchNorm layers first and the head's last, otherwise in order
        named.sort(key=lambda item: (id(item[1]) not in in_norms, id(item[1]) in in_head))
        statistics = running_statistics(self.module) if norms_first else []
        named = statistics + named
        dtypes = {p.dtype for _, p in named}
        require(
            len(dtypes) == 1 and next(iter(dtypes)).is_floating_point,
            f"{type(module).__name__} has trainable parameters of {', '.join(sorted(map(str, dtypes)))}; "
            "all of them must have one floating-point type.",
        )
        self.theta = torch.cat([p.detach().reshape(-1) for _, p in named])
        self.gradient = torch.zeros_like(self.theta)
        self._slots: list[tuple[str, int, torch.Size]] = []
        self._gradients: dict[Tensor, Tensor] = {}  # parameter -> its part of `gradient`
        slices: dict[Tensor, slice] = {}
        start = 0
        for name, p in named:
            slices[p] = part = slice(start, start + p.numel())
            p.data = self.theta[part].view(p.shape)
            if p.requires_grad:
                p.grad = None
                self._gradients[p] = self.gradient[part].view(p.shape)
            self._slots.append((name, start, p.shape))
            start = part.stop
        layers = dense_layers(self.module)
        self._dense = Dense(layers, slices, self.theta, self.gradient) if layers else None
        self._recording = False  # True while a gradient is being computed
        self._calls: list[tuple[Values, Tensor]] = []  # calls of a dense model since then: values and logits
        self._statistics_size = sum(b.numel() for _, b in statistics)
        self._norms_size = self._statistics_size + sum(p.numel() for _, p in named if id(p) in in_norms)
        self._head_size = sum(p.numel() for _, p in named if id(p) in in_head)

    @property
    def head_name(self) -> str:
        """The head's path in the module."""
        return self._named_head or "head"

    @property
    def head_layer(self) -> nn.Module:
        return self.module.get_submodule(self.head_name)

    @property
    def is_split(self) -> bool:
        """True if the module has a body and a head: `part`, `embed`, `head` and `features` can be used."""
        return self._head_size > 0 and (self._named_head is not None or hasattr(self.module, "embed"))

    def __repr__(self) -> str:
        numbers = str(self.dtype).removeprefix("torch.")
        return f"FlatModel({type(self.module).__name__}, {self.theta.numel()} parameters, {numbers} on {self.device})"

    @property
    def device(self) -> torch.device:
        return self.theta.device

    @property
    def dtype(self) -> torch.dtype:
        return self.theta.dtype

    def fixed(self) -> dict[str, Tensor]:
        """The tensors of the module that are not in theta and stay: frozen parameters and buffers."""
        frozen = {name: p for name, p in self.module.named_parameters() if not p.requires_grad}
        moving, counting = {name for name, *_ in self._slots}, self._counters()
        buffers = {n: b for n, b in self.module.named_buffers() if n not in moving and id(b) not in counting}
        return {**frozen, **buffers}

    def _counters(self) -> set[int]:
        """The ids of buffers that count batches and mean nothing, where BatchNorm layers are in theta."""
        return counters(self.module) if self._norms_first else set()

    def __call__(self, x: Tensor) -> Tensor:
        """Logits at the current theta, in training mode, with gradients.

        Inside `gradient_of`, no autograd graph connects the logits of a dense model with its parameters; for that, call
        `model.module(x)`.
        """
        closed_form = self._dense is not None and self._recording and torch.is_grad_enabled()
        if not closed_form or x.requires_grad or torch.is_autocast_enabled(x.device.type):
            output: Tensor = self.module(x)
            return output
        assert self._dense is not None
        values = self._dense.forward(x.clone())  # a copy: the loss may overwrite x
        logits = values[-1].detach().requires_grad_()  # the graph of the loss starts here
        self._calls.append((values, logits))
        return logits.clone()  # a copy: the loss may overwrite its logits

    def gradient_of(self, loss: Callable[[], Tensor], theta: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of a loss at theta, and the loss. The next call overwrites the gradient."""
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
        """Like `gradient_of`, for a loss of the logits of x whose derivative is given in closed form."""
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
        """Collect the gradients of one loss; clear everything before and after, also if it fails."""
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
        """Write `gradient`: a dense model's part in closed form, plus what autograd stored at the parameters."""
        used = [(values, logits.grad) for values, logits in self._calls if logits.grad is not None]
        if self._dense is not None and used:
            self._dense.backward(*(used[0] if len(used) == 1 else _merged(used)))
        for p, gradient in self._gradients.items():
            if p.grad is not None:
                gradient.add_(p.grad) if used else gradient.copy_(p.grad)
            elif not used:
                gradient.zero_()
        self.gradient[: self._statistics_size] = 0  # the forward pass moves them; what was written there is undone

    def embed(self, x: Tensor) -> Tensor:
        """Features at the current theta, in training mode, with gradients; `head` turns them into logits."""
        if self._named_head is not None:
            return input_of(self.head_layer, lambda: self.module(x))
        features: Tensor = self.module.embed(x)  # type: ignore[operator]
        return features

    def head(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head_layer(features)
        return logits

    def predict(self, theta: Tensor, x: Tensor) -> Tensor:
        """Logits of the frozen model at theta, in evaluation mode and without gradients."""
        if self._dense is not None:
            with torch.no_grad():
                return self._dense.forward(x, theta)[-1]
        with self._frozen(theta):
            return self(x).clone()  # a module may return a view of a parameter

    def features(self, theta: Tensor, x: Tensor) -> Tensor:
        """Features of the frozen model at theta, in evaluation mode and without gradients."""
        if self._dense is not None and self._head_size:  # in a dense model, the head is the last layer
            with torch.no_grad():
                return self._dense.forward(x, None if theta is self.theta else theta)[-2]
        with self._frozen(theta):
            return self.embed(x).clone()

    def is_head_of_embed(self, x: Tensor) -> bool:
        """True if forward(x) equals head(embed(x)), as it should."""
        with self._frozen(self.theta):
            logits, other = self(x), self.head(self.embed(x))
            return logits.shape == other.shape and torch.allclose(logits, other, atol=1e-4)

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
        """Set theta to another point inside the block; restore it afterwards."""
        if theta is self.theta:
            yield
            return
        before = self.theta.clone()
        self.theta.copy_(theta)
        try:
            yield
        finally:
            self.theta.copy_(before)

    def owns(self, tensor: Tensor) -> bool:
        """True if a tensor is a view of a flat buffer, which the next client overwrites."""
        storage = tensor.untyped_storage().data_ptr()
        return storage in (self.theta.untyped_storage().data_ptr(), self.gradient.untyped_storage().data_ptr())

    def on(self, device: torch.device) -> FlatModel:
        """The model on a device; if that is another device, do not use this object afterwards."""
        return self if self.device == device else FlatModel(self.module, device, *self._layout())

    def _layout(self) -> tuple[str | None, bool]:
        return self._named_head, self._norms_first

    def __reduce__(self) -> tuple[type[FlatModel], tuple[nn.Module, torch.device, str | None, bool]]:
        """Pickle a copy of the module: a pickled view would contain the whole flat vector."""
        module = copy.deepcopy(self.module).cpu()
        for buffer in module.buffers():
            buffer.data = buffer.data.clone()  # deepcopy has kept it as a view
        return FlatModel, (module, self.device, *self._layout())

    def accepts_one_sample(self, example: Tensor) -> bool:
        """True if the module can be trained on a batch of one sample, which BatchNorm may refuse."""
        before = self.theta.clone()
        try:
            with torch.no_grad():
                self.module(example[:1])
        except ValueError:
            return False
        finally:
            self.theta.copy_(before)
        return True

    def part(self, name: str) -> slice:
        """The slice of theta with a part of the model: "head" (the classifier) or "embed" (all layers before it).

        With `norms_first` also "batch_norm", of it the "statistics", and "without_batch_norm".
        """
        norms = {
            "statistics": slice(0, self._statistics_size),
            "batch_norm": slice(0, self._norms_size),
            "without_batch_norm": slice(self._norms_size, None),
        }
        if name in norms:
            return norms[name]
        require(name in ("embed", "head"), f"a part of a model is 'embed' or 'head', not {name!r}.")
        require(
            self.is_split,
            f"{type(self.module).__name__} has no split into `embed` and `head`; name its last layer (`model.head` in "
            "a config, `head` of a Federation), or give it a method `embed(x)` and a module `head`, so that forward(x) "
            "is head(embed(x)).",
        )
        cut = self.theta.numel() - self._head_size
        return slice(cut, None) if name == "head" else slice(0, cut)

    def state_dict(self, theta: Tensor) -> dict[str, Tensor]:
        """The module's state dict with the parameters of theta; every entry is a separate tensor."""
        views, state = self._views(theta), self.module.state_dict()
        values = {n: views[slot] for n, slot in self.slot_names().items()}
        unused = {n for n, b in self.module.named_buffers(remove_duplicate=False) if id(b) in self._counters()}
        values |= {n: torch.zeros_like(state[n]) for n in unused}
        return {n: values.get(n, t).detach().clone().contiguous().cpu() for n, t in state.items()}

    def slot_names(self) -> dict[str, str]:
        """The names in a state dict of what is in theta, each with the name of its slot; tied tensors share one."""
        module, slots = self.module, {name for name, *_ in self._slots}
        first = [*module.named_parameters(), *module.named_buffers()]
        slot = {id(tensor): name for name, tensor in first if name in slots}
        every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        return {name: slot[id(tensor)] for name, tensor in every if id(tensor) in slot}

    def load_state_dict(self, state: dict[str, Tensor], source: str) -> None:
        """Copy the weights of a state dict into the flat buffers; `source` names it in error messages."""
        own = self.module.state_dict()
        missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        common = sorted(own.keys() & state.keys())
        wrong_shape = [n for n in common if own[n].shape != state[n].shape]
        wrong_kind = [n for n in common if own[n].is_floating_point() != state[n].is_floating_point()]
        too_large = [n for n in common if not torch.isfinite(state[n].to(own[n].dtype)).all()]
        for names, problem in (
            (missing, "it lacks"),
            (extra, "the model does not have"),
            (wrong_shape, "the shape differs in"),
            (wrong_kind, "the kind of number (integer or floating-point) differs in"),
            (too_large, "numbers are too large for the model's type in"),
        ):
            if names:
                raise FedadcError(
                    f"{source} does not fit {type(self.module).__name__}: {problem} {', '.join(names[:3])}"
                    f"{' and more' if len(names) > 3 else ''}."
                )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])

    def _views(self, theta: Tensor) -> dict[str, Tensor]:
        return {name: theta[start : start + shape.numel()].view(shape) for name, start, shape in self._slots}


def _merged(calls: list[tuple[Values, Tensor]]) -> tuple[Values, Tensor]:
    """Several calls of a dense model, merged into one call on all their samples."""
    values, gradients = zip(*calls, strict=True)
    return [torch.cat(parts) for parts in zip(*values, strict=True)], torch.cat(gradients)
