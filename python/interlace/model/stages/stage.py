"""StageModule: consecutive layers of one module of a MultimodalModel, as a pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from interlace.model.inputs.places import targets_in
from interlace.model.language import LanguageSettings, run_language
from interlace.model.loss import cross_entropy_sum, head_cross_entropy, head_of
from interlace.model.modality import Encoders, ModalityModule
from interlace.model.sample import IGNORE


class StageModule(nn.Module):
    """Layers [start, stop) of module `name`; made by MultimodalModel.slice.

    Modules before the layers belong to the first stage, modules after them (norms, projector, head) to the last.
    Parameters have the same names as in the whole model, and only those of this stage are listed.
    """

    def __init__(
        self,
        name: str,
        part: nn.Module,
        start: int,
        stop: int,
        total: int,
        settings: LanguageSettings,
        frozen: dict[str, bool],
    ):
        super().__init__()
        self.name, self.start, self.stop = name, start, stop
        self.is_first, self.is_last = start == 0, stop == total
        self._settings = settings
        self._frozen = frozen
        self.is_encoder = isinstance(part, ModalityModule)
        if self.is_encoder:
            self.encoders = Encoders({name: part})
        else:
            self.language_model = part

    @property
    def ends_with_head(self) -> bool:
        """True if its language model's logits, before any `postprocess`, are exactly the head's output."""
        return self._settings.ends_with_head

    @property
    def layers(self) -> list[nn.Module]:
        """Layers [start, stop) of the module."""
        if self.is_encoder:
            layers: nn.Module = self.encoders[self.name].layers
        else:
            layers = self.language_model.get_submodule(self._settings.layer_path)
        assert isinstance(layers, nn.ModuleList)
        return list(layers)[self.start : self.stop]

    def train(self, mode: bool = True) -> StageModule:
        """Switch to training or evaluation mode; frozen modules stay in evaluation mode."""
        super().train(mode)
        keep_frozen(self, self._frozen)
        return self

    def forward(self, inputs: dict[str, Any], hidden: Tensor | None = None) -> Tensor:
        """Run the stage on one microbatch.

        inputs: the module's collated inputs (`MultimodalModel.collate_module`); for the first stage of the language
        model also "features": {encoder: [n, D]}.
        hidden: the previous stage's output; None on the first stage.
        Returns the hidden state ([1, N, D], or [B, T, D] of a language model in rows). On an encoder's last stage,
        returns features [n, D_llm]. On the language model's last stage, returns the sum of the cross entropy over valid
        targets, a scalar; the caller divides it.
        """
        self._check(hidden)
        if self.is_encoder:
            return self.encoders[self.name].run(inputs, hidden)
        logit_rows = columns = head = None
        if self.is_last and self._settings.postprocess is None:
            # The head runs only for positions with a target: in a packed row with media, most have none.
            logit_rows, columns = inputs["labels"] != IGNORE, targets_in(inputs)
            head = head_of(self.language_model) if self.ends_with_head else None
        output = run_language(
            self.language_model, self._settings, inputs, hidden, logit_rows=logit_rows, columns=columns, head=head
        )
        if not self.is_last:
            if isinstance(output, Tensor):
                return output
            raise ValueError(
                f"{self.name}: its forward does not reach layer {self.stop} of {self._settings.layer_path!r}: pass "
                "the list of text layers, ModalityModule(llm, projector=None, layers=...)"
            )
        labels = inputs["labels"]
        if head is not None:
            targets = labels[logit_rows] if columns is None else labels[0][columns]
            return head_cross_entropy(output, head, targets.to(output.device))
        return cross_entropy_sum(output.logits, labels if columns is None else labels[0][columns])

    def _check(self, hidden: Tensor | None) -> None:
        if self.is_first == (hidden is not None):
            wanted = "takes no hidden state" if self.is_first else "needs the previous stage's hidden state"
            raise ValueError(f"{self.name} [{self.start}:{self.stop}] {wanted}")

    def extra_repr(self) -> str:
        return f"{self.name}, layers {self.start} to {self.stop}"


def keep_frozen(root: nn.Module, frozen: Mapping[str, bool]) -> None:
    """Put the frozen modules inside `root` into evaluation mode.

    frozen: module name -> whether the whole module is frozen. For nested names, the innermost one applies.
    """
    for name, module in root.named_modules():
        path = name
        while path and path not in frozen:
            path = path.rpartition(".")[0]
        if frozen.get(path, False):
            module.training = False


def frozen_modules(root: nn.Module, path: str = "") -> list[str]:
    """Names of the outermost modules inside `root` (called `path`) with only frozen parameters, and at least one."""
    frozen = []
    for name, child in root.named_children():
        inside = f"{path}.{name}" if path else name
        trained = [parameter.requires_grad for parameter in child.parameters()]
        if any(trained):
            frozen += frozen_modules(child, inside)
        elif trained:
            frozen.append(inside)
    return frozen
