"""Configs: classes of annotated fields, checked when they are set, copied when they are read."""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import types
from collections.abc import Callable
from typing import Any, Generic, TypeVar, Union, dataclass_transform

T = TypeVar("T")


class RequiredFieldValue:
    """Stands for a value that must be given before ``instantiate``."""

    def __deepcopy__(self, memo: object) -> RequiredFieldValue:
        return self


REQUIRED: Any = RequiredFieldValue()
Required = Union[T, RequiredFieldValue]  # noqa: UP007 - subscripted by users

_PLAIN = (
    RequiredFieldValue,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.NoneType,
    int,
    float,
    str,
    enum.Enum,
)


class UnknownFieldError(AttributeError):
    """A name that is no field of the config."""


class InvalidConfigValueError(TypeError):
    """A value of a type that configs do not hold."""


class RequiredFieldMissingError(ValueError):
    """A required field was not set."""


def _check_value(value: object) -> None:
    if isinstance(value, list | tuple):
        for item in value:
            _check_value(item)
    elif isinstance(value, dict):
        for item in value.values():
            _check_value(item)
    elif not isinstance(value, _PLAIN) and not dataclasses.is_dataclass(value):
        raise InvalidConfigValueError(f"{value!r} of type {type(value)} is no value of a config")


class ConfigBase:
    """Fields with defaults; nothing else can be set."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in {field.name for field in dataclasses.fields(self)}:  # pyright: ignore
            raise UnknownFieldError(f"{name} (known: {dir(self)})")
        _check_value(value)
        object.__setattr__(self, name, copy.deepcopy(value))

    def set(self, **values: Any) -> Any:
        """Set several fields; returns the config."""
        for name, value in values.items():
            setattr(self, name, value)
        return self


@dataclass_transform(kw_only_default=True)
def config_class(cls: type[T]) -> type[T]:
    """Make a class of annotated fields a config. Its defaults are copied for each config."""
    for name in inspect.get_annotations(cls):
        default = cls.__dict__.get(name, dataclasses.MISSING)
        if default is not dataclasses.MISSING and not isinstance(default, RequiredFieldValue):
            _check_value(default)
    return dataclasses.dataclass(kw_only=True, eq=False)(cls)


class InstantiableConfig(ConfigBase, Generic[T]):
    """A config that something is built from."""

    def instantiate(self, **kwargs: Any) -> T:
        """Build it."""
        raise NotImplementedError(type(self))

    def _check_required(self) -> None:
        for field in dataclasses.fields(self):  # pyright: ignore
            if isinstance(getattr(self, field.name), RequiredFieldValue):
                raise RequiredFieldMissingError(f"{type(self)}: {field.name} is not set")


class Configurable:
    """What is built from a config of its own class ``Config``."""

    @config_class
    class Config(InstantiableConfig[Any]):
        """``klass``: what to build."""

        klass: type

        def instantiate(self, **kwargs: Any) -> Any:
            """Build ``klass``; RequiredFieldMissingError when a field is not set."""
            self._check_required()
            return self.klass(self, **kwargs)

    @classmethod
    def default_config(cls) -> Any:
        """A config with the defaults."""
        return cls.Config(klass=cls)

    def __init__(self, cfg: Any) -> None:
        self._config = copy.deepcopy(cfg)

    @property
    def config(self) -> Any:
        """A copy: changing it changes nothing."""
        return copy.deepcopy(self._config)


class _FunctionConfig(InstantiableConfig[Any]):
    """The arguments of a function."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "values", {})

    def __setattr__(self, name: str, value: Any) -> None:
        _check_value(value)
        self.values[name] = value

    def __deepcopy__(self, memo: Any) -> _FunctionConfig:
        return _FunctionConfig(self.fn).set(**self.values)

    def instantiate(self, **kwargs: Any) -> Any:
        return self.fn(**self.values, **kwargs)


# A config is a value that configs hold.
_PLAIN = (*_PLAIN, _FunctionConfig)


def config_for_function(fn: Callable[..., Any]) -> Any:
    """A config of the arguments of ``fn``; ``instantiate`` calls it."""
    return _FunctionConfig(fn)
