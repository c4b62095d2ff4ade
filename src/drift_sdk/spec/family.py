"""A family of models: how its files describe a decoder, and name its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from drift_sdk.spec.gguf import GGUFArchitecture
from drift_sdk.spec.model import ModelSpec
from drift_sdk.spec.settings import Settings

__all__ = ["Family", "OriginalFiles"]


class OriginalFiles(Struct, frozen=True, kw_only=True):
    """Files of a family that are not in the form of Hugging Face.

    marks:        settings that no config.json of Hugging Face has together.
    settings:     the settings of Hugging Face's config.json, from the file's settings.
    tensor_name:  Hugging Face's name of a tensor; its own name if the family has no such tensor.
    """

    marks: tuple[str, ...]
    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    tensor_name: Callable[[str], str]


class Family(Struct, frozen=True, kw_only=True):
    """A family of models.

    model_type:     as in a config.json.
    architectures:  values of `architectures` in a config.json. The first one is for models with a head;
                    whether a head is missing, files tell.
    spec:           the description of a model. Raises ModelLoadError naming a setting that is missing, out of
                    range or not implemented.
    defaults:       settings that files may lack, where transformers' defaults differ from those that
                    `spec` reads by itself.
    outer:          architectures of models of which a model of the family is the text part.
    gguf:           architectures of GGUF files.
    original:       other files; None: there are none.
    has_mxfp4:      files may have experts in MXFP4, and no quantised weights but these.
    """

    model_type: str
    architectures: tuple[str, ...]
    spec: Callable[[Settings], ModelSpec]
    defaults: Mapping[str, Any] = {}
    outer: tuple[str, ...] = ()
    gguf: tuple[GGUFArchitecture, ...] = ()
    original: OriginalFiles | None = None
    has_mxfp4: bool = False
