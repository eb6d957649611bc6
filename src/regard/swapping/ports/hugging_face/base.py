"""What the ports of transformers (>= 5.9) have in common, and the mark in the configuration of a swapped model.

The mixer replaces the whole attention module, so it does not depend on the model's attention implementation.
transformers saves neither the mechanism nor its code. The saved configuration of a swapped model therefore has
attn_implementation="regard": loading it by transformers alone fails at once, or, where Regard is imported, at the first
forward pass, instead of computing softmax without notice. Classes that never ask transformers which attention to use
would not notice it; their models have a name that transformers refuses always.
"""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.core import SwapError, UnsupportedError
from regard.swapping.host_parameters import inner_attention
from regard.swapping.layer import Port, library_mask

NAME = "regard"
"""attn_implementation of a swapped model whose attention asks transformers for the function of that name."""
REFUSED_NAME = "regard.load"
"""attn_implementation of a swapped model whose attention does not ask; transformers knows no such function."""


Answer = tuple[Tensor, Tensor | None]
"""What attention of transformers returns: its output, and weights or None."""


class HuggingPort(Port):
    """A port of transformers: its classes are named by their path, so that transformers need not be imported.

    parameter_names: paths of the modules of queries, keys and values -> qkv.q, qkv.k, qkv.v, or of one fused module ->
    qkv; of the output -> proj.
    routed: whether the class asks transformers which attention function to use.
    """

    routed: ClassVar[bool] = True
    dropouts = (*Port.dropouts, "dropout_prob")

    @classmethod
    def refusal(cls, module: Any) -> str:  # type: ignore[override]
        used = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if used not in (None, "eager", "sdpa", NAME):
            return f"masks for {used!r} have another form; call model.set_attn_implementation('sdpa') first"
        return ""

    @classmethod
    def weights_dropout(cls, module: Any) -> float:
        return super().weights_dropout(inner_attention(module))

    def mix(self, x: Tensor, attention_mask: Tensor | None, rope: Tensor | None, kwargs: Mapping[str, Any]) -> Answer:
        """The output and None in the place of weights. kwargs: of transformers; rope: sines, then cosines, (N, 2 d).

        Raises: UnsupportedError for output_attentions.
        """
        refuse_weights(kwargs.get("output_attentions"))
        mask = library_mask(attention_mask, bool(kwargs.get("is_causal", False)), x)
        return self.mixer(x, self.grid(), mask, rope), None


def refuse_weights(asked: object) -> None:
    """Raises: UnsupportedError if the layer is asked for attention weights, or its model collects them."""
    if asked or any("attentions" in name for name in _collected()):
        raise UnsupportedError(
            "a swapped model returns no attentions: leave output_attentions out; "
            "`with regard.capture(model) as maps:` collects the maps of a forward pass"
        )


def _collected() -> Collection[str]:
    """Names of what transformers collects by hooks in this forward pass, as an argument or the configuration asks."""
    from transformers.utils.output_capturing import _active_collector as collector

    if torch.compiler.is_dynamo_compiling() and not collector.compiling:
        return ()  # a layer compiled by itself: its model was called outside, where dynamo cannot look
    return collector.get() or ()


# the mark in the configuration of a swapped model


def missing_mechanism(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The attention function "regard" of transformers, called where the mechanism is missing. Raises: SwapError."""
    raise SwapError(
        f"{type(module).__name__} was saved with a mechanism of Regard and loaded without it: load a folder that "
        "regard.save wrote by regard.load; read one that transformers or a Trainer wrote with "
        "attn_implementation='sdpa' and swap it again, which loses a mechanism's own parameters, such as static keys"
    )


def mark_configuration(model: nn.Module) -> None:
    """Set or remove the attn_implementation of a swapped model in its transformers configurations, in place."""
    ports = [module for module in model.modules() if isinstance(module, HuggingPort)]
    for config in {id(c): c for m in model.modules() if (c := config_of(m)) is not None}.values():
        if ports:
            _register()
            config.attn_implementation = NAME if all(port.routed for port in ports) else REFUSED_NAME
        elif config.__dict__.get("attn_implementation") in (NAME, REFUSED_NAME):
            del config.attn_implementation


def config_of(module: nn.Module) -> Any:
    """The configuration that transformers gave a module, or None."""
    config = getattr(module, "config", None)
    return config if type(config).__module__.startswith("transformers.") else None


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, missing_mechanism)
    AttentionMaskInterface.register(NAME, sdpa_mask)
