"""User callbacks of a ModalityModule: checked when set, named in error messages."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor

if TYPE_CHECKING:
    from interlace.model.inputs.base import About, Inputs, Shape
    from interlace.model.sample import Media

CALLBACKS = {
    "preprocess": ("inputs",),
    "postprocess": ("inputs", "output"),
    "postprocess_projector": ("inputs", "features"),
    "tokens": ("shape", "about"),
    "collate": ("items",),
}
"""Arguments of each callback."""


class Callbacks(TypedDict, total=False):
    """Keyword arguments of `ModalityModule` for callbacks. Its docstring describes them. None: no callback."""

    preprocess: Callable[[Inputs], Inputs] | None
    postprocess: Callable[..., Any] | None
    postprocess_projector: Callable[[Inputs, Tensor], Tensor] | None
    tokens: Callable[[Shape, About], int] | None
    collate: Callable[[Sequence[Media]], Inputs] | None


def misfit(name: str, given: object) -> str:
    """Reason why `given` cannot be the callback `name`; "" if it can."""
    arguments = CALLBACKS[name]
    if not callable(given):
        return f"is a {type(given).__name__}, not a function"
    try:
        inspect.signature(given).bind(*arguments)
    except TypeError:
        return f"must take ({', '.join(arguments)}), not {inspect.signature(given)}"
    except ValueError:  # non-Python code has no signature
        pass
    return ""


def check(given: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown keyword and for a callback that is not a function of its arguments."""
    for name, callback in given.items():
        if name not in CALLBACKS:
            raise TypeError(f"ModalityModule.__init__() got an unexpected keyword argument {name!r}")
        if callback is not None and (why := misfit(name, callback)):
            raise TypeError(f"{name} = {_name(callback)} {why}")


def call(name: str, callback: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a callback. Raises RuntimeError naming the callback if it fails."""
    try:
        return callback(*arguments)
    except Exception as error:
        text = f"the callback {name} = {_name(callback)} raised {type(error).__name__}: {error}"
        raise RuntimeError(text) from error


def token_count(callback: Callable[..., Any], shape: tuple[int, ...], about: object) -> int:
    """The result of the callback "tokens". Raises ValueError if it fails, or gives no int of at least 1."""
    try:
        count = call("tokens", callback, shape, about)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    try:
        fits = not isinstance(count, bool) and operator.index(count) >= 1
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(
            f"the callback tokens = {_name(callback)} gave {count!r} for an item of shape {shape}: it must return the "
            "number of language-model tokens that the item becomes, an int of at least 1"
        )
    return operator.index(count)


def check_features(features: object, counts: Sequence[int]) -> None:
    """Raise ValueError unless the callbacks return a tensor with one feature per token of the items."""
    got = len(features) if isinstance(features, Tensor) else f"a {type(features).__name__} instead of"
    if got != sum(counts):
        raise ValueError(
            f"an encoder and its callbacks made {got} features of {len(counts)} items of {sum(counts)} tokens in "
            "total: the callback tokens must return the number of features of an item after postprocess_projector"
        )


def _name(callback: object) -> str:
    return getattr(callback, "__qualname__", None) or repr(callback)
