"""The one vocabulary: frozen, validated problem types that feed theory and simulation alike.

Every type checks its arguments on construction, is hashable, compares by value and survives a round trip through
JSON (`to_json`, `problem_from_json`). Numbers are normalised once, here: integers may arrive as Python or NumPy
integers or as integer-valued floats, and leave as ``int``; reals leave as ``float``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from theory.results import DomainError, FloatArray

# Bounds on sizes and exponents: beyond them powers leave the range of float64.
MAX_SIZE = 10**18
MAX_EXPONENT = 100.0
MAX_SCALE = 1e100
MIN_SCALE = 1e-100
# Arrays of one number per eigenvalue are materialised up to this dimension; larger spectra are compressed.
MAX_ARRAY_DIM = 10**8
# Largest relative asymmetry of a covariance that is put down to rounding.
SYMMETRY_TOLERANCE = 1e-12


def _shown(value: object) -> str:
    """``value`` as it is printed in an error: on one line and of at most 500 characters."""
    try:
        text = " ".join(line.strip() for line in repr(value).split("\n"))
    except ValueError:  # Python refuses to print integers of more than 4300 digits
        return f"a value of type {type(value).__name__} that is too long to print"
    return text if len(text) <= 500 else f"{text[:497]}..."


def as_integer(name: str, value: object, low: int, high: int = MAX_SIZE) -> int:
    """``value`` as an ``int`` in ``[low, high]``.

    Integer-valued floats and NumPy scalars are accepted, booleans are not. Raises DomainError otherwise.
    Source: validation of the problem types; no equation.
    """
    sentence = f"{name} must be an integer from {low} to {high}, got {_shown(value)}"
    if isinstance(value, bool | np.bool_ | np.timedelta64) or not isinstance(value, numbers.Real):
        raise DomainError(sentence)
    try:
        number: int = int(value)  # type: ignore[call-overload]
    except (OverflowError, ValueError):  # infinities and NaN
        raise DomainError(sentence) from None
    if number != value or not low <= number <= high:
        raise DomainError(sentence)
    return number


def as_real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    """``value`` as a finite ``float`` in ``[low, high]``, or in ``(low, high]`` where ``open_low``.

    Raises DomainError otherwise. Source: validation of the problem types; no equation.
    """
    bracket = "(" if open_low else "["
    sentence = f"{name} must be a finite number in {bracket}{low:g}, {high:g}], got {_shown(value)}"
    if isinstance(value, bool | np.bool_ | np.timedelta64) or not isinstance(value, numbers.Real):
        raise DomainError(sentence)
    try:
        number = float(value)
    except OverflowError:
        raise DomainError(sentence) from None
    if not math.isfinite(number) or number > high or number < low or (open_low and number == low):
        raise DomainError(sentence)
    return number + 0.0  # turns -0.0 into 0.0, so that equal problems print alike


def _as_array(name: str, value: object) -> FloatArray:
    """``value`` as a float64 array of finite numbers, each of them checked as in `as_real`, with 0.0 for -0.0."""
    try:
        array = np.asarray(value) if hasattr(value, "__array__") else np.asarray(value, dtype=object)
    except (TypeError, ValueError, RuntimeError):
        raise DomainError(f"{name} must be an array of numbers, got {_shown(value)}") from None
    if array.dtype == object:
        largest = sys.float_info.max
        items = [as_real(name, item, -largest, largest) for item in array.ravel()]
        return np.array(items, dtype=np.float64).reshape(array.shape)
    if array.dtype.kind not in "iuf":
        raise DomainError(f"{name} must hold real numbers, got an array of {array.dtype}: {_shown(value)}")
    with np.errstate(over="ignore"):
        array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise DomainError(f"{name} must be finite, got {float(array[~np.isfinite(array)][0])!r}")
    return np.asarray(array + 0.0)


def as_depths(depth: object) -> FloatArray:
    """Depths as a float64 array of integers >= 0 (any shape). Raises DomainError otherwise.

    Source: validation of the number of layers L of the depth paper; no equation.
    """
    array = _as_array("depth", depth)
    bad = ~((array >= 0) & (array == np.floor(array)) & (array <= MAX_SIZE))
    if bad.any():
        raise DomainError(f"depth must hold integers from 0 to {MAX_SIZE}, got {float(array[bad].flat[0])!r}")
    return array


def _as_vector(name: str, values: object) -> tuple[float, ...]:
    array = _as_array(name, values)
    if array.ndim != 1 or array.size == 0:
        raise DomainError(f"{name} must be a non-empty sequence of numbers, got shape {array.shape}")
    return tuple(array.tolist())


def as_covariance(name: str, value: object, dim: int) -> tuple[tuple[float, ...], ...]:
    """A ``dim x dim`` symmetric positive definite matrix as nested tuples.

    Asymmetry up to rounding (1e-12 of the largest entry) is averaged away. Entries are at most 1e100 and variances at
    least 1e-100; a matrix that rounding cannot tell from a singular one is refused. Raises DomainError otherwise.
    Source: validation of the input covariance, multihead section 5.3.
    """
    matrix = _as_array(name, value)
    if matrix.shape != (dim, dim):
        raise DomainError(f"{name} must have shape ({dim}, {dim}), got {matrix.shape}")
    largest = float(np.abs(matrix).max())
    if largest > MAX_SCALE:
        raise DomainError(f"{name} must have entries of at most {MAX_SCALE:g} in magnitude, got {largest!r}")
    asymmetry = float(np.abs(matrix - matrix.T).max())
    if asymmetry > SYMMETRY_TOLERANCE * largest:
        raise DomainError(f"{name} must be symmetric, got entries that differ by {asymmetry:g} from the transpose")
    symmetric = (matrix + matrix.T) / 2
    variances = symmetric.diagonal()
    if variances.min() < MIN_SCALE:
        raise DomainError(
            f"{name} must be positive definite with variances of at least {MIN_SCALE:g}, "
            f"got the variance {float(variances.min())!r}"
        )
    # Scaled to unit variances, the smallest eigenvalue of a singular matrix is rounding: a few dim * eps at most.
    scales = np.sqrt(variances)
    smallest = float(np.linalg.eigvalsh(symmetric / scales / scales[:, np.newaxis])[0])
    if smallest <= 8 * dim * np.finfo(np.float64).eps:
        raise DomainError(
            f"{name} must be positive definite, got {smallest:g} as the smallest eigenvalue of its correlations"
        )
    return tuple(tuple(row) for row in symmetric.tolist())


class _JsonProblem:
    """JSON round trip shared by all problem types."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict with the type's name under ``type``."""
        content: dict[str, Any] = {"type": type(self).__name__}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            content[field.name] = value.to_json() if isinstance(value, _JsonProblem) else _plain(value)
        return content

    def canonical(self) -> str:
        """The one text of this problem: sorted keys, shortest exact floats; equal problems have equal texts."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


class Spectrum(_JsonProblem):
    """What both kinds of spectrum share: eigenvalues of the input and of the teacher covariance, mode by mode."""

    __slots__ = ()
    dim: int | None

    def input_variances(self) -> FloatArray:
        """Eigenvalues λ_k of the input covariance, shape (dim,). Source: depth (2), (3)."""
        raise DomainError("a spectrum must define its input variances")

    def teacher_variances(self) -> FloatArray:
        """Eigenvalues ω_k of the teacher covariance, shape (dim,). Source: depth (2), (3)."""
        raise DomainError("a spectrum must define its teacher variances")

    def label_variances(self) -> FloatArray:
        """Products λ_k ω_k, the part of the label variance in mode k, shape (dim,). Source: depth (30)."""
        return self.input_variances() * self.teacher_variances()

    @property
    def isotropic_input(self) -> bool:
        """Whether all λ_k are equal, so that the inputs look alike in every direction."""
        raise DomainError("a spectrum must say whether its input is isotropic")


@dataclass(frozen=True, slots=True)
class PowerLawSpectrum(Spectrum):
    r"""Power-law spectra :math:`\lambda_k = c_\lambda k^{-a}`, :math:`\omega_k = c_\omega k^{-b}`, k = 1..dim.

    input_exponent a >= 0, teacher_exponent b >= 0 (at most 100); dim: number of modes, 1 to 10^18, or ``None`` for
    infinitely many; input_scale, teacher_scale: :math:`c_\lambda, c_\omega` in [1e-100, 1e100].
    The papers' sizes are dim 128 (linear attention) and 16 (softmax attention) with unit scales.
    Source: depth (2) and the display after (30). Raises DomainError outside these ranges.
    """

    input_exponent: float
    teacher_exponent: float
    dim: int | None = None
    input_scale: float = 1.0
    teacher_scale: float = 1.0

    def __post_init__(self) -> None:
        fix = object.__setattr__
        fix(self, "input_exponent", as_real("input_exponent", self.input_exponent, 0, MAX_EXPONENT))
        fix(self, "teacher_exponent", as_real("teacher_exponent", self.teacher_exponent, 0, MAX_EXPONENT))
        if self.dim is not None:
            fix(self, "dim", as_integer("dim", self.dim, 1))
        fix(self, "input_scale", as_real("input_scale", self.input_scale, MIN_SCALE, MAX_SCALE))
        fix(self, "teacher_scale", as_real("teacher_scale", self.teacher_scale, MIN_SCALE, MAX_SCALE))

    @property
    def zeta(self) -> float:
        r"""Source exponent :math:`\zeta = (a + b - 1)/a`.

        Source: depth, display after (30). Raises DomainError where a = 0 (the inputs are isotropic and one layer is
        enough) or a + b <= 1 (the label variance of infinitely many modes diverges), and where a is so small that
        zeta leaves the range of float64.
        """
        a, b = self.input_exponent, self.teacher_exponent
        if a == 0:
            raise DomainError("input_exponent must be > 0 for the source exponent zeta to exist, got 0.0")
        if a + b <= 1:
            raise DomainError(
                f"input_exponent + teacher_exponent must be > 1 for zeta > 0, got {a:g} + {b:g} = {a + b:g}"
            )
        zeta = math.fsum((a, b, -1.0)) / a
        if not math.isfinite(zeta):
            raise DomainError(f"input_exponent must be large enough for zeta to be finite, got {a!r}")
        return zeta

    def _modes(self) -> FloatArray:
        if self.dim is None or self.dim > MAX_ARRAY_DIM:
            size = "infinite" if self.dim is None else str(self.dim)
            raise DomainError(
                f"dim must be at most {MAX_ARRAY_DIM} to list the eigenvalues one by one, got {size}; "
                "risks of larger spectra are available from theory.depth"
            )
        return np.arange(1, self.dim + 1, dtype=np.float64)

    def input_variances(self) -> FloatArray:
        """Eigenvalues λ_k = c_λ k^-a, shape (dim,). Source: depth (2)."""
        return self.input_scale * self._modes() ** -self.input_exponent

    def teacher_variances(self) -> FloatArray:
        """Eigenvalues ω_k = c_ω k^-b, shape (dim,). Source: depth (2)."""
        return self.teacher_scale * self._modes() ** -self.teacher_exponent

    @property
    def isotropic_input(self) -> bool:
        """Whether all λ_k are equal: a = 0 or a single mode."""
        return self.input_exponent == 0 or self.dim == 1


@dataclass(frozen=True, slots=True)
class ArraySpectrum(Spectrum):
    """A spectrum given mode by mode, for users who bring their own.

    eigenvalues: λ_k > 0 of the input covariance; teacher: ω_k >= 0 of the teacher covariance, same length, not all
    zero. Any order; equal eigenvalues are allowed. Source: depth (3). Raises DomainError otherwise.
    """

    eigenvalues: tuple[float, ...]
    teacher: tuple[float, ...]

    def __post_init__(self) -> None:
        eigenvalues = _as_vector("eigenvalues", self.eigenvalues)
        teacher = _as_vector("teacher", self.teacher)
        if len(eigenvalues) != len(teacher):
            raise DomainError(
                f"teacher must have as many entries as eigenvalues ({len(eigenvalues)}), got {len(teacher)}"
            )
        _check_range("eigenvalues", eigenvalues, MIN_SCALE)
        _check_range("teacher", teacher, 0.0)
        if max(teacher) == 0:
            raise DomainError("teacher must have at least one entry > 0, got only zeros")
        object.__setattr__(self, "eigenvalues", eigenvalues)
        object.__setattr__(self, "teacher", teacher)

    @property
    def dim(self) -> int:  # type: ignore[override]
        """Number of modes."""
        return len(self.eigenvalues)

    def input_variances(self) -> FloatArray:
        """Eigenvalues λ_k as given, shape (dim,). Source: depth (3)."""
        return np.array(self.eigenvalues)

    def teacher_variances(self) -> FloatArray:
        """Eigenvalues ω_k as given, shape (dim,). Source: depth (3)."""
        return np.array(self.teacher)

    @property
    def isotropic_input(self) -> bool:
        """Whether all λ_k are equal."""
        return min(self.eigenvalues) == max(self.eigenvalues)


def _check_range(name: str, values: tuple[float, ...], low: float) -> None:
    for value in (min(values), max(values)):
        if not low <= value <= MAX_SCALE:
            raise DomainError(f"{name} must lie in [{low:g}, {MAX_SCALE:g}], got {value!r}")


def _as_spectrum(value: object, *, finite: bool) -> Spectrum:
    if not isinstance(value, PowerLawSpectrum | ArraySpectrum):
        raise DomainError(f"spectrum must be a PowerLawSpectrum or an ArraySpectrum, got {_shown(value)}")
    if finite and value.dim is None:
        raise DomainError("spectrum.dim must be finite for this task, got None")
    return value


@dataclass(frozen=True, slots=True)
class CopyTask(_JsonProblem):
    """The easy task: predict the label of the query, which is one of the context tokens.

    spectrum: input and teacher spectra; context: number of tokens P, 1 to 10^18, or ``None`` for the limit of
    infinitely many, where the empirical covariance is the population's. Source: depth (5), (25).
    """

    spectrum: Spectrum
    context: int | None = None

    def __post_init__(self) -> None:
        _as_spectrum(self.spectrum, finite=False)
        if self.context is not None:
            object.__setattr__(self, "context", as_integer("context", self.context, 1))


@dataclass(frozen=True, slots=True)
class TopKTask(_JsonProblem):
    """The difficult task: predict the mean label of the ``top_k`` tokens most similar (by cosine) to the query.

    spectrum: finite-dimensional; context: number of tokens P; top_k: 1 <= top_k <= context. Source: depth (6), (41).
    """

    spectrum: Spectrum
    context: int
    top_k: int

    def __post_init__(self) -> None:
        _as_spectrum(self.spectrum, finite=True)
        object.__setattr__(self, "context", as_integer("context", self.context, 1))
        object.__setattr__(self, "top_k", as_integer("top_k", self.top_k, 1))
        if self.top_k > self.context:
            raise DomainError(f"top_k must be at most context ({self.context}), got {self.top_k}")


@dataclass(frozen=True, slots=True)
class RegressionTask(_JsonProblem):
    """In-context linear regression with label noise.

    dim d, context L: 1 to 10^18; noise: label noise variance σ² >= 0; covariance: symmetric positive definite
    ``dim x dim`` input covariance, or ``None`` for the identity. The teacher is N(0, I/dim), so that labels have
    unit variance before noise where the covariance is the identity. Source: multihead section 2 and 5.3.
    """

    dim: int
    context: int
    noise: float
    covariance: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        _fix_regression_sizes(self)
        if self.covariance is not None:
            covariance = as_covariance("covariance", self.covariance, self.dim)
            object.__setattr__(self, "covariance", covariance)

    def covariance_matrix(self) -> FloatArray:
        """The input covariance, shape (dim, dim). Raises DomainError where it has more than 10^8 entries."""
        if self.dim**2 > MAX_ARRAY_DIM:
            raise DomainError(f"dim must be at most {math.isqrt(MAX_ARRAY_DIM)} for a matrix, got {self.dim}")
        return np.eye(self.dim) if self.covariance is None else np.array(self.covariance)


@dataclass(frozen=True, slots=True)
class MultiTaskRegression(_JsonProblem):
    """Several regressions on one input: task n uses only the coordinates in ``signal_sets[n]``.

    dim d, context L, noise σ² as in `RegressionTask`; signal_sets: one non-empty set of coordinates per task, counted
    from 1 to dim as in the paper, kept sorted; sets may overlap. Source: multihead Definitions 5.1 and 5.2.
    """

    dim: int
    context: int
    noise: float
    signal_sets: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        _fix_regression_sizes(self)
        all_members = _as_collection("signal_sets", self.signal_sets, "a sequence of sets of coordinates")
        sets = tuple(_as_signal_set(number, members, self.dim) for number, members in enumerate(all_members, 1))
        if not sets:
            raise DomainError("signal_sets must hold at least one set, got none")
        object.__setattr__(self, "signal_sets", sets)


def _as_collection(name: str, value: object, kind: str) -> tuple[object, ...]:
    sentence = f"{name} must be {kind}, got {_shown(value)}"
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Iterable):
        raise DomainError(sentence)
    try:
        return tuple(value)
    except TypeError:  # arrays without dimensions
        raise DomainError(sentence) from None


def _fix_regression_sizes(task: RegressionTask | MultiTaskRegression) -> None:
    object.__setattr__(task, "dim", as_integer("dim", task.dim, 1))
    object.__setattr__(task, "context", as_integer("context", task.context, 1))
    object.__setattr__(task, "noise", as_real("noise", task.noise, 0, MAX_SCALE))


def _as_signal_set(number: int, members: object, dim: int) -> tuple[int, ...]:
    name = f"signal_sets[{number}]"
    items = _as_collection(name, members, f"a set of coordinates from 1 to {dim}")
    coordinates = tuple(sorted(as_integer(name, item, 1, dim) for item in items))
    if not coordinates or len(set(coordinates)) != len(coordinates):
        raise DomainError(f"{name} must be non-empty and without repeats, got {coordinates!r}")
    return coordinates


Problem = PowerLawSpectrum | ArraySpectrum | CopyTask | TopKTask | RegressionTask | MultiTaskRegression
_PROBLEM_TYPES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (PowerLawSpectrum, ArraySpectrum, CopyTask, TopKTask, RegressionTask, MultiTaskRegression)
}


def problem_from_json(content: object) -> Problem:
    """The problem that ``to_json`` wrote. Raises DomainError where type, fields or values are not those of a problem.

    Source: JSON round trip of the problem types; no equation.
    """
    if not isinstance(content, Mapping):
        raise DomainError(f"a problem must be a JSON object, got {_shown(content)}")
    name = content.get("type")
    if not isinstance(name, str) or name not in _PROBLEM_TYPES:
        raise DomainError(f"type must be one of {', '.join(_PROBLEM_TYPES)}, got {_shown(name)}")
    cls = _PROBLEM_TYPES[name]
    known = [field.name for field in dataclasses.fields(cls)]
    fields = {key: value for key, value in content.items() if key != "type"}
    unknown = sorted(set(fields) - set(known), key=str)
    if unknown:
        raise DomainError(f"{name} has the fields {', '.join(known)}, got the unknown field {unknown[0]!r}")
    required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    missing = [key for key in required if key not in fields]
    if missing:
        raise DomainError(f"{name} needs the field {missing[0]!r}, got {sorted(fields)}")
    if isinstance(fields.get("spectrum"), Mapping):
        fields["spectrum"] = problem_from_json(fields["spectrum"])
    problem: Problem = cls(**fields)
    return problem
