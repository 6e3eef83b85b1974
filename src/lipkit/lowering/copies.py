"""The copy of a network that is traced: all its weights, even computed ones, are constant numbers.

In it classes of this file replace torch's attention, and compute it by operations that have rules. Only the class of
a copied module changes, not its numbers, and `lipkit.lowering.observe` compares the copy's outputs with those of the
network.
"""

import copy
import inspect
import warnings
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lipkit.errors import NoRuleError, rewording
from lipkit.modules.guarding import guard, refuse_wrapper, type_name
from lipkit.modules.parametrised import settled


def _at(name: str) -> str:
    return f"at {name!r}: " if name else ""


def constant_copy(model: nn.Module) -> nn.Module:
    """A copy of ``model`` on the CPU whose parametrised weights are the numbers that its forward pass uses now.

    So are the weights of hook-based spectral and weight normalisation. Wrappers, other hooks, replaced methods and
    weights that change in each forward pass are refused.
    """
    if not isinstance(model, nn.Module):
        raise NoRuleError(f"analyze: expected an nn.Module, got {type(model).__qualname__}")
    for name, module in model.named_modules():
        refuse_wrapper(module, f"{_at(name)}analyze")
        if isinstance(module, torch.jit.ScriptModule):
            raise NoRuleError(
                f"{_at(name)}analyze: expected modules in Python, got {type(module).__qualname__}: pass the network "
                "that it was made from"
            )
    start = "analyze: expected a module that can be copied, got "
    with rewording(NoRuleError, start, Exception, named=True):  # the module is the user's and may raise anything
        twin = copy.deepcopy(model, computed_tensors(model))
    for module, made in zip(model.modules(), twin.modules(), strict=False):
        made.training = module.training  # a copy that its class makes anew, as einops does, is in training mode
    if not _same_numbers(model, twin):
        raise NoRuleError(
            "analyze: expected a module whose copy holds the same modules and numbers, got "
            f"{type(model).__qualname__}, whose copy by copy.deepcopy differs: see its __deepcopy__ or __reduce__"
        )
    for step in (_materialise, guard):
        for name, module in list(twin.named_modules()):
            try:
                step(module)
            except NoRuleError as error:
                raise NoRuleError(f"{_at(name)}{error}") from None
    for module in twin.modules():
        module.__class__ = PLAIN.get(type(module), type(module))
    return twin.requires_grad_(False).cpu()


def computed_tensors(model: nn.Module) -> dict[int, object]:
    """Copies of the tensors that deepcopy refuses: results of a computation, such as hook-based weights."""
    memo: dict[int, object] = {}
    for module in model.modules():
        run = vars(module).get("_flat_weights", ())  # of an nn.RNN with parametrizations, in its last run
        for value in (*vars(module).values(), *module._parameters.values(), *run):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
    return memo


def _same_numbers(model: nn.Module, twin: nn.Module) -> bool:
    known = (*model.modules(), *twin.modules())
    types = [{name: type_name(type(module)) for name, module in one.named_modules()} for one in (model, twin)]
    first, second = (contents_of(one, known) for one in (model, twin))
    same = types[0] == types[1] and first.keys() == second.keys()
    return same and all(equal(value, second[name]) for name, value in first.items())


def _materialise(module: nn.Module) -> None:
    with torch.no_grad():
        plain = settled(module)
    if plain is not module:
        module.__class__, module.__dict__ = type(plain), vars(plain)  # in place: others may hold the module, too
    # Backward hooks change no output, and a constant copy has no derivatives.
    module._backward_hooks.clear()
    module._backward_pre_hooks.clear()


_PLAIN = vars(nn.Module()).keys() - {"training"}


def contents_of(root: nn.Module, known: Iterable[nn.Module] = ()) -> dict[str, Any]:
    """The `contents` of all attributes of all modules and their classes, by path.

    Modules inside of an attribute, and those in ``known``, count by their type alone.
    """
    found: dict[str, Any] = {}
    seen = {id(module): (module, type(module)) for module in (*root.modules(), *known)}
    for path, module in root.named_modules():
        own: dict[str, Any] = {}
        for kind in reversed(type(module).__mro__):  # so that a class replaces what its bases have
            own |= {} if kind.__module__.startswith(("builtins", "lipkit", "torch")) else vars(kind)
        own |= {name: value for name, value in vars(module).items() if name not in _PLAIN}
        for name, value in (own | module._parameters | module._buffers).items():
            found[f"{path}.{name}"] = contents(value, seen)
    return found


def contents(value: Any, seen: dict[int, tuple[Any, Any]]) -> Any:
    """All numbers, strings and tensors (not copied) inside a value (container, object, function), in nested lists.

    ``seen``: by id, the values met before, and their contents. A value inside itself counts as its type; a value in two
    places has the same contents in both.
    """
    if isinstance(value, Tensor):
        return value.detach()
    if value is None or isinstance(value, (int, float, complex, str, bytes)):
        return int.__int__(value) if isinstance(value, int) else value  # sizes of batches are of a type of their own
    if isinstance(value, (type, ModuleType)):
        return type(value)
    if isinstance(value, fx.Graph):
        return str(value)  # made by torch.fx: a copy has its own nodes
    if id(value) in seen:
        return seen[id(value)][1]
    seen[id(value)] = value, type(value)  # keeps the value alive, so that no other gets its id
    parts: Any
    try:
        if isinstance(value, FunctionType):
            used, home = inspect.getclosurevars(value), value.__module__
            parts = [v for v in used.globals.values() if not isinstance(v, FunctionType) or v.__module__ == home]
            parts += [*used.nonlocals.values(), value.__defaults__, value.__kwdefaults__, vars(value)]
        elif isinstance(value, (tuple, list, dict)):
            parts = value.items() if isinstance(value, dict) else value
        elif isinstance(value, set):
            parts = sorted(value, key=repr)
        else:
            with warnings.catch_warnings():  # Python 3.12 and 3.13 copy an itertools.count, and warn that 3.14 will not
                warnings.simplefilter("ignore", DeprecationWarning)
                reduced = value.__reduce_ex__(4)[1:]  # all but the function that would make the copy
            parts = [list(p) if hasattr(p, "__next__") else p for p in reduced]
    except Exception:  # what cannot be copied is not looked into
        return type(value)
    found = [contents(part, seen) for part in parts]
    seen[id(value)] = value, found
    return found


def equal(a: Any, b: Any, known: set[tuple[int, int]] | None = None) -> bool:
    """True if two `contents` are equal; ``known`` holds the pairs of lists that were compared before."""
    known = set() if known is None else known
    if isinstance(a, list) and isinstance(b, list):
        if (id(a), id(b)) not in known:
            known.add((id(a), id(b)))  # lists may contain themselves
            return len(a) == len(b) and all(equal(x, y, known) for x, y in zip(a, b, strict=True))
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if type(a) not in (Tensor, nn.Parameter) or a.is_meta or a.layout is not torch.strided or a.is_quantized:
            return type(a) is type(b)  # refused wherever it holds a weight
        alike = a.shape == b.shape and a.dtype == b.dtype
        if alike and a.is_floating_point() and not torch.equal(a.signbit() & (a == 0), b.signbit() & (b == 0)):
            return False  # 0.0 and -0.0
        return alike and (torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()))  # a != a: NaN
    return type(a) is type(b) and (repr(a) == repr(b) if isinstance(a, float) else bool(a == b or (a != a and b != b)))


# Attention of torch.


def _require_causal(mask: Any) -> None:
    """Refuse another mask beside ``is_causal``: torch then reads it without derivatives, and ignores it with them."""
    hidden = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1)
    if not (mask == (hidden if mask.dtype == torch.bool else torch.zeros(()).masked_fill(hidden, -torch.inf))).all():
        raise NoRuleError("analyze: nn.MultiheadAttention: expected the causal mask beside is_causal, got another one")


class PlainAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` head by head: products, a softmax, products."""

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if self.bias_k is not None or self.bias_v is not None or self.add_zero_attn:
            raise NoRuleError("analyze: nn.MultiheadAttention: expected add_bias_kv=False and add_zero_attn=False")
        if key is None or value is None:
            raise NoRuleError("analyze: nn.MultiheadAttention: expected three tensors, as in attention(x, x, x)[0]")
        if query.ndim != 3:
            what = f"expected 3 dimensions, got {query.ndim}: it would take the batch for a sequence"
            raise NoRuleError(f"analyze: nn.MultiheadAttention: {what}")
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)  # stored one below the other: q, k, v
        else:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        # (B, heads, n, features of a head)
        q, k, v = (
            F.linear(x if self.batch_first else x.transpose(0, 1), w, b)
            .unflatten(-1, (self.num_heads, self.head_dim))
            .transpose(1, 2)
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        scores = q * self.head_dim**-0.5 @ k.transpose(-2, -1)
        if attn_mask is not None:
            if is_causal and not need_weights and key_padding_mask is None:
                _require_causal(attn_mask)
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads)) if attn_mask.ndim == 3 else attn_mask
        hidden = None if key_padding_mask is None else key_padding_mask.unsqueeze(1).unsqueeze(1)  # (B, 1, 1, keys)
        for mask in (attn_mask, hidden):
            if mask is not None:
                scores = scores.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        p = F.dropout(scores.softmax(-1), self.dropout, self.training)
        y = F.linear((p @ v).transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        shown = (p.mean(1) if average_attn_weights else p) if need_weights else None  # 1: the heads
        return (y if self.batch_first else y.transpose(0, 1)), shown


class PlainEncoderLayer(nn.TransformerEncoderLayer):
    """``nn.TransformerEncoderLayer`` without its fast path."""

    def forward(
        self, src: Tensor, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False
    ) -> Tensor:
        if self.norm_first:
            src = src + self._sa_block(self.norm1(src), src_mask, src_key_padding_mask, is_causal)
            return src + self._ff_block(self.norm2(src))
        src = self.norm1(src + self._sa_block(src, src_mask, src_key_padding_mask, is_causal))
        return self.norm2(src + self._ff_block(src))


class PlainEncoder(nn.TransformerEncoder):
    """``nn.TransformerEncoder``: its layers one after the other."""

    def forward(self, src: Tensor, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None) -> Any:
        if src_key_padding_mask is not None and self.use_nested_tensor:
            why = "got True, for which torch writes zeros for hidden tokens where it records no derivatives"
            raise NoRuleError(f"analyze: nn.TransformerEncoder: expected enable_nested_tensor=False, {why}")
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask, bool(is_causal))
        return src if self.norm is None else self.norm(src)


PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: PlainAttention,
    nn.TransformerEncoderLayer: PlainEncoderLayer,
    nn.TransformerEncoder: PlainEncoder,
}
