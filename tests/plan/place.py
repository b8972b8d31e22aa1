"""Stub model for placement tests."""

from __future__ import annotations

from types import SimpleNamespace

LLM = "language_model"


class Model:
    """The parts of a model that placement needs. `layers`: (forward cost, trainable) of each module's layers."""

    def __init__(self, layers):
        self.given = layers

    def modules_order(self):
        return list(self.given)

    def nominal_length(self, name):
        return 1

    def layers(self, name, context=None):
        return [
            SimpleNamespace(index=i, parts=[SimpleNamespace(forward_flops=cost, trainable=trained)])
            for i, (cost, trained) in enumerate(self.given[name])
        ]

    def seconds(self, name, frozen_aware=True, recompute=False):
        """1F + 1B of every layer: input and weight gradient each cost one forward, recomputation one more."""
        result = []
        before = name == LLM and any(
            trained for other in self.given if other != name for _, trained in self.given[other]
        )
        for forward, trained in self.given[name]:
            passes = 1 + trained + before if frozen_aware else 3
            result.append(forward * (passes + (recompute and passes > 1)))
            before = before or trained
        return result


def model(**layers):
    """Modules with these numbers of equal layers, all trained."""
    return Model({name: [(1.0, True)] * count for name, count in layers.items()})
