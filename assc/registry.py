"""Spec strings and the registry of policies.

A spec string is `name`, `name:key=value,key=value`, or `name:VALUE` where VALUE is the policy's main parameter
(`static:4`, `bandit:ucb`). A policy around another one takes its spec in parentheses, `guard(assc:variant=diagram)` or
`guard(static:4):span=8`; a shell wants quotes around that. A path that ends with `.zip` names a saved artefact,
that of a directory (with a separator in it: `./x`) the `policy.zip` of a run.
Policies register through the entry-point group `assc.policies`: each entry point is a module whose import calls
`@register`.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from assc.core import Policy
from assc.errors import SpecError
from assc.policy_files import POLICY_FILE, saved_spec, seed_files, without_alias

ENTRY_POINT_GROUP = "assc.policies"

Factory = Callable[..., Policy]
F = TypeVar("F", bound=Factory)

INNER = "policy"
"""key of the spec in parentheses, and the name of the constructor's parameter that takes it"""

_factories: dict[str, Factory] = {}
_artefact_loader: Callable[[str], Policy] | None = None
_loaded = False


def register(name: str) -> Callable[[F], F]:
    """Register a policy class under `name`. Its keyword-only or keyword parameters are the keys of its spec."""

    def add(factory: F) -> F:
        if name in _factories and _factories[name] is not factory:
            places = f"{_factories[name].__module__} and {factory.__module__}"
            raise SpecError(f"policy {name!r} is registered twice, in {places}; keep one of the two")
        _factories[name] = factory
        return factory

    return add


def register_artefact_loader(loader: Callable[[str], Policy]) -> None:
    """Set the function that turns the path of a saved policy into a policy object."""
    global _artefact_loader
    _artefact_loader = loader


def load_plugins() -> None:
    """Import every module of the entry-point group once. A plug-in that fails to import is named in the error."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry.load()
        except Exception as error:
            raise SpecError(f"the policy plug-in {entry.name!r} ({entry.value}) cannot be imported: {error}") from error
    if "ar" not in _factories:  # running from a source tree that was never installed
        importlib.import_module("policies")


def policy_names() -> tuple[str, ...]:
    """All registered names, sorted."""
    load_plugins()
    return tuple(sorted(_factories))


def policy_factory(name: str) -> Factory:
    """The registered class of a policy; `SpecError` for an unknown name."""
    load_plugins()
    base, at, _ = name.partition("@")
    if at and base in _factories:
        raise SpecError(
            f"{name!r} is the policy {base!r} under another name, which only the rows of eval.py --policies can have, "
            "as SPEC@NAME with a NAME of letters, digits, _ and -"
        )
    if name not in _factories:
        raise SpecError(
            f"unknown policy {name!r}; known policies: {', '.join(sorted(_factories))}, or a saved .zip file"
            f"{' (the directory is ./' + name + ')' if Path(name).is_dir() else ''}"
        )
    return _factories[name]


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Split a spec string into its name and its raw parameters; the main parameter has the key "".

    >>> parse_spec("assc:variant=diagram,k_max=6")
    ('assc', {'variant': 'diagram', 'k_max': '6'})
    >>> parse_spec("static:4")
    ('static', {'': '4'})
    >>> parse_spec("guard(assc:k_min=1,k_max=6):span=8")
    ('guard', {'policy': 'assc:k_min=1,k_max=6', 'span': '8'})
    """
    outer, inner = _take_inner(spec)
    name, _, rest = outer.strip().partition(":")
    if not name.strip():
        raise SpecError(f"the policy spec {spec!r} has no name; write name or name:key=value,key=value")
    values: dict[str, str] = {} if inner is None else {INNER: inner}
    for part in rest.split(",") if rest else []:
        key, equals, value = part.partition("=")
        if not equals:
            key, value = "", key
        if (equals and not key.strip()) or not value.strip() or key.strip() in values:
            raise SpecError(f"the policy spec {spec!r} is malformed at {part!r}; write name:key=value,key=value")
        values[key.strip()] = value.strip()
    if spec.rstrip().endswith((":", ",")):
        raise SpecError(f"the policy spec {spec!r} ends with a separator; write name:key=value,key=value")
    return name.strip(), values


def _take_inner(spec: str) -> tuple[str, str | None]:
    """The spec without its parentheses and what stands in them; None where the name has none."""
    start = spec.find("(")
    if start < 0 or ":" in spec[:start]:
        return spec, None
    depth = 0
    for i in range(start, len(spec)):
        depth += {"(": 1, ")": -1}.get(spec[i], 0)
        if depth == 0:
            inner, rest = spec[start + 1 : i].strip(), spec[i + 1 :].strip()
            if not inner or (rest and not rest.startswith(":")):
                break
            return spec[:start] + rest, inner
    raise SpecError(
        f"the policy spec {spec!r} has wrong parentheses; write name(spec) or name(spec):key=value,key=value"
    )


def artefacts_in(spec: str) -> tuple[str, ...]:
    """Paths of the saved policies that a spec reads, also inside `guard(…)`. An unreadable spec names none.

    Of a run directory it is its `policy.zip`, of a folder of seeds those of all seeds. `static:4@b` is `static:4`.

    >>> artefacts_in("runs/a.zip"), artefacts_in("guard(guard(a.zip):span=8)"), artefacts_in("guard(assc)")
    (('runs/a.zip',), ('a.zip',), ())
    """
    spec = without_alias(spec.strip())
    if os.sep in spec and Path(spec).is_dir():
        files = (Path(spec) / POLICY_FILE, *seed_files(Path(spec)).values())
        return tuple(str(file) for file in files if file.is_file())
    if spec.endswith(".zip"):
        return (spec,)
    try:
        _, values = parse_spec(spec)
    except SpecError:
        return ()
    return tuple(dict.fromkeys(path for value in values.values() for path in artefacts_in(value)))


def _convert(spec: str, key: str, raw: str, parameter: inspect.Parameter) -> Any:
    """Turn raw text into the type of the parameter's default (int, float, bool, str)."""
    kind = (
        parameter.annotation if isinstance(parameter.annotation, str) else getattr(parameter.annotation, "__name__", "")
    )
    try:
        if kind.startswith("bool"):
            return {"true": True, "1": True, "false": False, "0": False}[raw.lower()]
        if kind.startswith("int"):
            return int(raw)
        if kind.startswith("float"):
            return float(raw)
    except (ValueError, KeyError):
        raise SpecError(
            f"the policy spec {spec!r} gives {key or 'its value'}={raw!r}, which is not a valid {kind}"
        ) from None
    return raw


def make_policy(spec: str, *, seed: int = 0) -> Policy:
    """Build a policy from its spec string or load it from a saved `.zip` artefact.

    A run directory stands for the `policy.zip` in it. Raises `SpecError` (unknown name, unknown key, bad value) or
    `ArtefactError`. `seed` reaches policies that draw
    random numbers, unless the spec gives its own.
    """
    load_plugins()
    spec = saved_spec(spec.strip())
    if spec.endswith(".zip"):
        if _artefact_loader is None:
            raise SpecError(f"no loader for saved policies is registered, so {spec!r} cannot be read")
        return _artefact_loader(spec)
    name, raw = parse_spec(spec)
    factory = policy_factory(name)
    parameters = dict(inspect.signature(factory).parameters)
    main: str | None = getattr(factory, "main_parameter", None)
    arguments: dict[str, Any] = {}
    for key, value in raw.items():
        target = main if key == "" else key
        if key == INNER and INNER not in parameters and "(" in spec:
            raise SpecError(f"policy {name!r} is not one that goes around another, so it takes no ({value})")
        if target is None or target not in parameters:
            allowed = ", ".join(parameters) or "none"
            wrong = f"key {key!r}" if key else f"value {value!r} without a key"
            raise SpecError(f"policy {name!r} takes no {wrong}; its keys: {allowed}")
        if target in arguments:
            raise SpecError(f"the policy spec {spec!r} gives {target!r} twice")
        arguments[target] = _convert(spec, key, value, parameters[target])
    if "seed" in parameters and "seed" not in arguments:
        arguments["seed"] = seed
    missing = [p for p, v in parameters.items() if v.default is inspect.Parameter.empty and p not in arguments]
    if missing:
        raise SpecError(
            f"policy {name!r} needs {', '.join(missing)}, for example {getattr(factory, 'example', name)!r}"
        )
    try:
        policy = factory(**arguments)
    except ValueError as error:
        raise SpecError(f"the policy spec {spec!r} is refused: {error}") from None
    policy.spec = spec.strip()
    return policy
