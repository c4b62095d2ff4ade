"""The families of models that are known: a file each in this folder, and families of other packages.

Another package adds a family by `register`, or by an entry point of the group "drift_sdk.families" that
names a `Family`, which is loaded when the first model is looked up.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules
from threading import local
from typing import Any

from drift_sdk.errors import ConfigError, ModelLoadError, short_repr
from drift_sdk.spec.family import Family, GGUFArchitecture, OriginalFiles
from drift_sdk.spec.model import ModelSpec
from drift_sdk.spec.settings import Settings, check_quantisation, check_rope_fields

__all__ = ["GROUP", "Family", "families", "gguf_architecture", "original_files", "read_spec", "register"]

GROUP = "drift_sdk.families"
"""The group of entry points."""
NULLABLE = ("sliding_window",)  # null is a value of its own, not the default
OUTER_SETTINGS = ("quantization_config", "tie_word_embeddings")
UNSUPPORTED = ("attn_logit_softcapping", "use_bidirectional_attention")
OF_IMAGES = "vision"
"""The value of `use_bidirectional_attention` where it concerns the rows of images alone."""
LOGITS_CAP = "final_logit_softcapping"
"""A setting that few families read."""

log = logging.getLogger("drift_sdk")


class Registry:
    """Families by model_type, in the order in which they were added.

    broken: what is wrong with entry points that could not be loaded.
    """

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}
        self._is_complete = False
        self._loading = local()
        self.broken: list[str] = []

    def all(self) -> tuple[Family, ...]:
        """All families. Threads that call it for the first time at once load them each: with a lock, one that
        imports a package which registers a family would wait for one that loads its entry point."""
        if self._is_complete or getattr(self._loading, "is_here", False):
            return tuple(self._families.values())

        self._loading.is_here = True
        try:
            for module in iter_modules(__path__):
                self.add(import_module(f"{__name__}.{module.name}").FAMILY)
            for entry in entry_points(group=GROUP):
                self._load(entry)
            self._is_complete = True
        finally:
            self._loading.is_here = False
        return tuple(self._families.values())

    def add(self, family: object) -> None:
        """Raises ConfigError for what is no Family, and for one whose names another family has."""
        if not isinstance(family, Family):
            raise ConfigError.of("family", family, "a drift_sdk.spec.Family")

        _check_fields(family)
        others = [other for other in list(self._families.values()) if other != family]
        for name in ("model_type", "architectures", "gguf"):
            taken = {each: other.spec.__module__ for other in others for each in _names(other, name)}
            if found := [each for each in _names(family, name) if each in taken]:
                allowed = f"a name that no other family has: {taken[found[0]]} has it"
                raise ConfigError.of(name, found[0], allowed)

        self._families[family.model_type] = family

    def _load(self, entry: EntryPoint) -> None:
        try:
            self.add(entry.load())
        except (Exception, SystemExit) as error:  # code of another package may raise anything
            found = f"the family {entry.name} of {entry.value} could not be loaded: {error!r}"
            if found not in self.broken:
                self.broken.append(found)
                log.warning(found)


def _check_fields(family: Family) -> None:
    """Raise ConfigError for a field of a type that would only be found when a model is looked up."""
    for name in ("architectures", "outer"):
        value, least = getattr(family, name), int(name == "architectures")
        if not isinstance(value, tuple) or len(value) < least or not all(isinstance(e, str) for e in value):
            raise ConfigError.of(name, value, f"a tuple of {least} or more names")

    if not callable(family.spec):
        raise ConfigError.of("spec", family.spec, "a function from Settings to a ModelSpec")

    if not isinstance(family.defaults, Mapping):
        raise ConfigError.of("defaults", family.defaults, "a mapping from settings to values")


def _names(family: Family, field: str) -> tuple[object, ...]:
    if field == "gguf":
        return tuple((each.name, each.mark) for each in family.gguf)

    value = getattr(family, field)
    return value if isinstance(value, tuple) else (value,)


REGISTRY = Registry()


def register(family: Family) -> None:
    """Add a family, in this process. To add it again changes nothing.

    Raises ConfigError for what is no Family, and for one whose model_type, architectures or GGUF
    architectures another family has.
    """
    REGISTRY.all()
    REGISTRY.add(family)


def families() -> tuple[Family, ...]:
    """All families that are known."""
    return REGISTRY.all()


def read_spec(config: Mapping[str, Any], *, max_model_len: int | None = None) -> ModelSpec:
    """The description of a model, from the contents of its config.json. A model that reads images as well is
    described by its text part.

    max_model_len: length of the longest sequence that will be computed, in tokens; None: the model's context.
    It decides between the two sets of factors of a LongRoPE.

    Raises ModelLoadError naming a setting that is missing, out of range or not implemented.
    """
    family, config = _find(config)
    given = {name: value for name, value in config.items() if value is not None or name in NULLABLE}
    check_rope_fields(given)
    settings = Settings({**family.defaults, **given}, max_model_len)
    for name in UNSUPPORTED:
        if settings.get(name) and settings[name] != OF_IMAGES:
            raise ModelLoadError(f"config: {name}={short_repr(settings[name])} is not implemented")

    check_quantisation(settings, has_mxfp4=family.has_mxfp4)
    name = f"the family {family.model_type} of {family.spec.__module__}"
    try:
        spec = family.spec(settings)
    except ModelLoadError:
        raise
    except Exception as error:  # code of another package may raise anything
        raise ModelLoadError(f"config: {name} cannot read it: {error!r}") from error

    if not isinstance(spec, ModelSpec):
        raise ModelLoadError(f"config: {name} read it as {short_repr(spec)}: expected a ModelSpec")

    if spec.logits_cap is None and settings.get(LOGITS_CAP):
        raise ModelLoadError(f"config: {LOGITS_CAP}={short_repr(settings[LOGITS_CAP])} is not implemented")

    return spec


def original_files(settings: Mapping[str, Any]) -> OriginalFiles | None:
    """The form of files that are not Hugging Face's, by the contents of config.json; None for others."""
    if "model_type" in settings:
        return None

    found = (family.original for family in families() if family.original is not None)
    return next((files for files in found if all(name in settings for name in files.marks)), None)


def gguf_architecture(metadata: Mapping[str, Any], location: str) -> tuple[Family, GGUFArchitecture]:
    """The family and the architecture of a GGUF file.

    location: the file, for messages. Raises ModelLoadError for an architecture that is not implemented.
    """
    name = metadata.get("general.architecture")
    known = [(family, architecture) for family in families() for architecture in family.gguf]
    found = [each for each in known if each[1].name == name]
    if not found:
        names = ", ".join(dict.fromkeys(architecture.name for _, architecture in known))
        raise ModelLoadError(
            f"{location}: architecture {short_repr(name)}, expected one of {names}{_broken()}"
        )

    marked = [each for each in found if each[1].mark and metadata.get(f"{name}.{each[1].mark}")]
    return (marked or [each for each in found if not each[1].mark])[0]


def _find(config: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any]]:
    """The family of a model, and the settings of its text part; without `architectures`, `model_type`
    decides."""
    architectures, model_type = config.get("architectures"), config.get("model_type")
    outer = [family for family in families() for name in family.outer if architectures == [name]]
    if outer:
        return _text_part(config, outer)

    for family in families():
        if architectures:
            is_named = architectures in ([name] for name in family.architectures)
            if is_named and config.get("model_type", family.model_type) == family.model_type:
                return family, config
        elif model_type == family.model_type:
            return family, config

    found = ", ".join(f"{name}={short_repr(config.get(name))}" for name in ("architectures", "model_type"))
    known = ", ".join(family.architectures[0] for family in families())
    raise ModelLoadError(f"config: {found}: expected one of {known}{_broken()}")


def _text_part(config: Mapping[str, Any], outer: list[Family]) -> tuple[Family, Mapping[str, Any]]:
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelLoadError(f"config: text_config={short_repr(text)}: expected a table of settings")

    model_type = text.get("model_type")
    known = {family.model_type: family for family in outer}
    if (model_type is not None or len(known) > 1) and model_type not in list(known):
        found = f"text_config with model_type={short_repr(model_type)}"
        raise ModelLoadError(f"config: {found}: expected one of {', '.join(known)}")

    family = outer[0] if model_type is None else known[model_type]
    around = {name: config[name] for name in OUTER_SETTINGS if config.get(name) is not None}
    own = {name: value for name, value in text.items() if value is not None or name not in around}
    return family, {**around, **own}


def _broken() -> str:
    """What is wrong with entry points, as the end of a message."""
    return "".join(f" ({each})" for each in REGISTRY.broken)
