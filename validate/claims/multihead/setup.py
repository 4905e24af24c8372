"""Claims multihead:2.1 to multihead:3.2 and Observations 1 to 4: data, architecture, and what training is said to find.

Trained models are not run here. A statement about them is read as one about the minimiser of the population loss (2.5)
that they are trained on, which is known exactly, and printed trained numbers are compared with it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
from scipy.special import softmax

from sim.streams import stream
from theory.multihead import bayes_risk as bayes
from theory.multihead import gradient_descent as descent
from theory.multihead import gradient_flow as flow
from theory.multihead import softmax_risk as exact
from theory.multihead.approximate_loss import single_head_optimum
from theory.multihead.solution_manifold import effective_mu
from theory.problems import RegressionTask
from theory.results import FloatArray
from validate.claims.exact import mismatches, rational
from validate.claims.ledger import Evidence, Ledger, Method, Relation, statistical

LEDGER = Ledger()
FALSE_ALARM = 1e-6
# What "is approximately" must mean for a user who reads numbers off a formula.
APPROXIMATELY = 0.1
ROUNDING = 1e-12
# The setting of all experiments in the paper's main text.
PAPER = RegressionTask(5, 40, 0.1)
# The trained models that the paper prints: one head (Figure 3a), two heads (Table 1).
ONE_HEAD = (0.52, 1.42)
TWO_HEADS = (0.1267, 3.5006)
# Small and large dimension, ratio and noise: the regimes in which every statement is tried.
REGIMES = (
    PAPER,
    RegressionTask(1, 10, 1.0),
    RegressionTask(2, 400, 0.0),
    RegressionTask(40, 20, 0.5),
    RegressionTask(300, 100, 0.01),
)
REGIME_TEXT = "(d,L,noise) in " + " ".join(f"({task.dim},{task.context},{task.noise:g})" for task in REGIMES)


@functools.cache
def best_heads(task: RegressionTask, heads: int) -> exact.SoftmaxOptimum:
    """The exact optimum of one to four heads."""
    return exact.optimum(task, heads)


def z_score(values: FloatArray, expected: float) -> float:
    """Distance of the mean of independent values from ``expected`` in standard errors; ties count as agreement."""
    error = float(values.std(ddof=1)) / np.sqrt(values.size)
    return float((values.mean() - expected) / error) if error > 0 else 0.0


def worst_score(scores: list[float]) -> float:
    return max(scores, key=abs)


def sample(
    task: RegressionTask, count: int, generator: np.random.Generator
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Tokens (n, L, d), labels (n, L), query (n, d) and its noisy label (n,), by the data model of section 2."""
    X = generator.standard_normal((count, task.context, task.dim))
    query = generator.standard_normal((count, task.dim))
    if task.covariance is not None:
        root = np.linalg.cholesky(task.covariance_matrix())
        X, query = X @ root.T, query @ root.T
    teacher = generator.standard_normal((count, task.dim)) / np.sqrt(task.dim)
    deviation = np.sqrt(task.noise)
    labels = (X @ teacher[:, :, np.newaxis])[:, :, 0] + deviation * generator.standard_normal((count, task.context))
    return X, labels, query, np.sum(query * teacher, axis=1) + deviation * generator.standard_normal(count)


@LEDGER.claim(
    "multihead:2.1a",
    "linear data with noisy labels",
    r"y_\ell=\beta^\top x_\ell+\epsilon_\ell,\quad\epsilon_\ell\sim N(0,\sigma^2),\ x_\ell\sim N(0,I_d),\ \beta\sim N(0,I_d/d)",
    reading="checked by what it implies: E y^2 = 1 + sigma^2 and E y_1 y_2 x_1.x_2 = 1",
)
def data_model() -> Iterator[Evidence]:
    scores = []
    for index, task in enumerate((RegressionTask(1, 2, 1.0), RegressionTask(5, 2, 0.1), RegressionTask(60, 2, 0.0))):
        X, y, _, _ = sample(task, 100_000, stream(2, "multihead:2.1a", index))
        scores.append(z_score(y[:, 0] ** 2, 1 + task.noise))
        scores.append(z_score(y[:, 0] * y[:, 1] * np.sum(X[:, 0] * X[:, 1], axis=1), 1.0))
    yield statistical(
        worst_score(scores), FALSE_ALARM / 6, "second moments of labels", "dim 1, 5, 60; noise 1, 0.1, 0"
    )


def _embedding(X: FloatArray, y: FloatArray, query: FloatArray) -> FloatArray:
    return np.hstack([np.vstack([X.T, y]), np.append(query, 0)[:, np.newaxis]])


@LEDGER.claim(
    "multihead:2.1",
    "embedding of a context",
    r"Z_{ebd}=[Z\ z_q]=\begin{bmatrix}x_1&\dots&x_L&x_q\\y_1&\dots&y_L&0\end{bmatrix}\in\mathbb R^{(d+1)\times(L+1)}",
)
def embedding() -> Iterator[Evidence]:
    wrong = 0.0
    for index, (d, L) in enumerate(((1, 1), (2, 7), (5, 3))):
        rng = stream(2, "multihead:2.1", index)
        X, y, query = rational(rng, L, d), rational(rng, L), rational(rng, d)
        Z = np.hstack([np.vstack([X.T, y]), np.array([*query, Fraction(0)], dtype=object)[:, np.newaxis]])
        wrong += float(Z.shape != (d + 1, L + 1)) + mismatches(Z[:, L][:d], query) + float(Z[d, L] != 0)
        wrong += sum(mismatches(Z[:, token], np.append(X[token], y[token])) for token in range(L))
    yield Evidence(Method.EXACT, wrong, 0.0, "wrong shapes or columns", "(d,L) in (1,1) (2,7) (5,3)")


def _masked_layer(Z: FloatArray, OV: FloatArray, KQ: FloatArray) -> FloatArray:
    """(2.2) with the causal mask on the (L+1) x (L+1) scores; columns without a key are NaN, as softmax makes them."""
    n = Z.shape[1]
    out = Z.copy()
    allowed = np.arange(n)[:, np.newaxis] < np.arange(n)
    for value, key_query in zip(OV, KQ, strict=True):
        with np.errstate(invalid="ignore"):
            scores = np.where(allowed, Z.T @ key_query @ Z, -np.inf)
            weights = np.exp(scores - scores.max(axis=0))
            out = out + value @ Z @ (weights / weights.sum(axis=0))
    return out


def _random_layer(name: str) -> Iterator[tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]]:
    for index, (d, L, heads) in enumerate(((1, 4, 1), (3, 2, 2), (4, 9, 3))):
        rng = stream(3, name, index)
        Z = rng.standard_normal((d + 1, L + 1))
        Z[d, L] = 0
        O, V, K, Q = rng.standard_normal((4, heads, d + 1, d + 1))  # noqa: E741
        yield Z, O, V, K, Q


_LAYERS = "(d,L,H) in (1,4,1) (3,2,2) (4,9,3), random matrices"


@LEDGER.claim(
    "multihead:2.2",
    "multi-head softmax attention layer",
    r"TF_\theta(Z)=Z+\sum_hO^{(h)}V^{(h)}Z\cdot smax\circ msk(Z^\top K^{(h)\top}Q^{(h)}Z),\quad"
    r" msk:\mathbb R^{(d+1)\times(L+1)}\mapsto\mathbb R^{(d+1)\times(L+1)},\ msk_{ij}=Id\,1(i<j)-\infty1(i\ge j)",
)
def layer() -> Iterator[Evidence]:
    rows, undefined = 0.0, 0.0
    for Z, O, V, K, Q in _random_layer("multihead:2.2"):  # noqa: E741
        scores = Z.T @ K[0].T @ Q[0] @ Z
        rows = max(rows, abs(scores.shape[0] - Z.shape[0]))
        result = _masked_layer(Z, O @ V, np.swapaxes(K, 1, 2) @ Q)
        undefined += float(np.isnan(result).any(axis=0).sum())
    yield Evidence(Method.EXACT, rows, 0.0, "rows of the scores minus rows that the mask takes", _LAYERS)
    yield Evidence(Method.EXACT, undefined, 0.0, "output columns that are softmax over nothing", _LAYERS)


@LEDGER.correction(
    "multihead:2.2",
    Relation.MISPRINT,
    r"msk:\mathbb R^{(L+1)\times(L+1)}\mapsto\mathbb R^{(L+1)\times(L+1)},\text{ applied to columns }j\ge2;\ TF_\theta(Z)_{\cdot1}=z_1",
    "the first column has no earlier token, and its softmax is 0/0: an implementation must skip it",
)
def layer_without_first_column() -> Iterator[Evidence]:
    error, leak = 0.0, 0.0
    for Z, O, V, K, Q in _random_layer("multihead:2.2"):  # noqa: E741
        OV, KQ = O @ V, np.swapaxes(K, 1, 2) @ Q
        result = _masked_layer(Z, OV, KQ)[:, 1:]
        for j in range(1, Z.shape[1]):
            plain = Z[:, j] + sum(
                value @ Z[:, :j] @ softmax(Z[:, :j].T @ key_query @ Z[:, j])
                for value, key_query in zip(OV, KQ, strict=True)
            )
            error = max(error, float(np.abs(plain - result[:, j - 1]).max() / (1 + np.abs(plain).max())))
        future = Z.copy()
        future[:, -1] += 1
        leak = max(leak, float(np.abs((_masked_layer(future, OV, KQ) - _masked_layer(Z, OV, KQ))[:, 1:-1]).max()))
    yield Evidence(Method.NUMERIC, error, ROUNDING, "error against attention over earlier tokens", _LAYERS)
    yield Evidence(Method.NUMERIC, leak, 0.0, "change of earlier columns by a later token", _LAYERS)


@LEDGER.claim(
    "multihead:2.3a",
    "read-out of the prediction",
    r"\hat y_q:=TF_\theta(Z_{ebd})_{d+1,L+1}",
    reading="entry (d+1, L+1) as here and in (2.5); the caption of Figure 2 has the indices exchanged",
)
def read_out() -> Iterator[Evidence]:
    residual = 0.0
    for Z, O, V, K, Q in _random_layer("multihead:2.3a"):  # noqa: E741
        d, L = Z.shape[0] - 1, Z.shape[1] - 1
        update = _masked_layer(Z, O @ V, np.swapaxes(K, 1, 2) @ Q) - Z
        residual = max(residual, abs(_masked_layer(Z, O @ V, np.swapaxes(K, 1, 2) @ Q)[d, L] - update[d, L]))
    yield Evidence(Method.NUMERIC, residual, 0.0, "contribution of the residual link to the read-out", _LAYERS)


@LEDGER.claim(
    "multihead:2.3b",
    "what the read-out estimates",
    r"E[y_q|x_q]=\beta^\top x_q",
    reading="beta is random, as in the expectation (2.5)",
)
def conditional_mean() -> Iterator[Evidence]:
    # A function of x_q has no variance given x_q; beta^T x_q over teachers does: one query each, many teachers.
    spread = 0.0
    for index, dim in enumerate((2, 30)):
        rng = stream(2, "multihead:2.3b print", index)
        query, teachers = rng.standard_normal(dim), rng.standard_normal((10_000, dim)) / np.sqrt(dim)
        spread = max(spread, float(np.var(teachers @ query)))
    yield Evidence(Method.NUMERIC, spread, 0.0, "variance of the right side at one x_q, over teachers", "dim 2, 30")


@LEDGER.correction(
    "multihead:2.3b",
    Relation.MISPRINT,
    r"E[y_q|x_q,\beta]=\beta^\top x_q",
    "given x_q alone the mean is zero",
)
def conditional_mean_given_teacher() -> Iterator[Evidence]:
    scores = []
    for index, task in enumerate((RegressionTask(2, 1, 1.0), RegressionTask(30, 1, 0.1))):
        rng = stream(2, "multihead:2.3b", index)
        query, teacher = rng.standard_normal((2, 100_000, task.dim))
        label = np.sum(query * teacher, axis=1) / np.sqrt(task.dim)
        noisy = label + np.sqrt(task.noise) * rng.standard_normal(100_000)
        scores += [z_score((noisy - label) * label, 0.0), z_score((noisy - label) ** 2, task.noise)]
        scores.append(z_score(noisy * query[:, 0], 0.0))
    yield statistical(worst_score(scores), FALSE_ALARM / 6, "moments of y_q - beta.x_q", "dim 2, 30; noise 1, 0.1")


@LEDGER.claim(
    "multihead:2.3",
    "the prediction as attention of the query",
    r"\hat y_q=\sum_hO^{(h)}_{d+1,\cdot}V^{(h)}Z\cdot smax(Z^\top K^{(h)\top}Q^{(h)}x_q)",
)
def attention_of_query() -> Iterator[Evidence]:
    gap = 0.0
    for Z, _, _, _, Q in _random_layer("multihead:2.3"):
        gap = max(gap, float(Q[0].shape[1] - Z[:-1, -1].size))
    yield Evidence(Method.EXACT, gap, 0.0, "columns of Q minus entries of x_q", _LAYERS)


@LEDGER.correction(
    "multihead:2.3",
    Relation.MISPRINT,
    r"\hat y_q=\sum_hO^{(h)}_{d+1,\cdot}V^{(h)}Z\cdot smax(Z^\top K^{(h)\top}Q^{(h)}z_q),\quad z_q=(x_q^\top,0)^\top",
    "x_q has d entries, Q has d+1 columns",
)
def attention_of_padded_query() -> Iterator[Evidence]:
    error = 0.0
    for Z, O, V, K, Q in _random_layer("multihead:2.3"):  # noqa: E741
        full = _masked_layer(Z, O @ V, np.swapaxes(K, 1, 2) @ Q)[-1, -1]
        tokens, query = Z[:, :-1], Z[:, -1]
        terms = [
            float(o[-1] @ v @ tokens @ softmax(tokens.T @ k.T @ q @ query))
            for o, v, k, q in zip(O, V, K, Q, strict=True)
        ]
        error = max(error, abs(sum(terms) - full) / (1 + sum(map(abs, terms))))
    yield Evidence(Method.NUMERIC, error, ROUNDING, "error against the layer (2.2)", _LAYERS)


@LEDGER.claim(
    "multihead:2.4",
    "only three blocks of the circuits matter",
    r"KQ=\begin{bmatrix}KQ_{11}&*\\KQ_{21}&*\end{bmatrix},\quad OV=\begin{bmatrix}*&*\\OV_{21}&OV_{22}\end{bmatrix}",
)
def effective_blocks() -> Iterator[Evidence]:
    change, least = 0.0, np.inf
    for Z, O, V, K, Q in _random_layer("multihead:2.4"):  # noqa: E741
        OV, KQ = O @ V, np.swapaxes(K, 1, 2) @ Q / 20  # gentle scores, so that no softmax is saturated
        base = _masked_layer(Z, OV, KQ)[-1, -1]
        other_value, other_key = OV.copy(), KQ.copy()
        other_value[:, :-1] += 1
        other_key[:, :, -1] += 1
        change = max(change, abs(_masked_layer(Z, other_value, other_key)[-1, -1] - base))
        for block in range(3):
            moved_value, moved_key = OV.copy(), KQ.copy()
            if block == 0:
                moved_key[:, :-1, :-1] += stream(24, "block").standard_normal(moved_key[:, :-1, :-1].shape)
            elif block == 1:
                moved_key[:, -1, :-1] += 1
            else:
                moved_value[:, -1] += 1
            least = min(least, abs(_masked_layer(Z, moved_value, moved_key)[-1, -1] - base))
    yield Evidence(Method.NUMERIC, change, 1e-12, "change of the prediction by the starred blocks", _LAYERS)
    yield Evidence(Method.NUMERIC, 1e-3 / least, 1.0, "0.001 over the least change by another block", _LAYERS)


_RISK_POINTS = (
    (PAPER, (0.1267, -0.1267), (3.5006, -3.5006)),
    (RegressionTask(2, 10, 1.0), (0.5,), (1.2,)),
    (RegressionTask(20, 15, 0.0), (0.2, -0.15, 0.05), (1.0, -1.5, 0.4)),
)


@LEDGER.claim(
    "multihead:2.5",
    "population loss against the noisy label",
    r"\mathcal L(\theta)=\mathcal E(\hat y_q)=E[(y_q-\hat y_q)^2]",
    reading="y_q carries noise, so that every risk is sigma^2 above the risk against beta.x_q",
)
def population_loss() -> Iterator[Evidence]:
    scores, agree = [], []
    for index, (task, omega, mu) in enumerate(_RISK_POINTS):
        X, y, query, label = sample(task, 60_000, stream(25, "multihead:2.5", index))
        guess = descent.softmax_prediction(X, y, query, omega, mu)
        scores.append(z_score((label - guess) ** 2, exact.softmax_risk(task, omega, mu).value))
        noise = np.sqrt(task.noise) * stream(25, "multihead:2.5 noise", index).standard_normal(label.size)
        agree.append(z_score((label + noise - guess) ** 2 - (label - guess) ** 2, task.noise))
    what, domain = "sampled risk against softmax_risk", "paper's two heads; (2,10,1) one head; (20,15,0) three heads"
    yield statistical(worst_score(scores), FALSE_ALARM / 3, what, domain)
    yield statistical(
        worst_score(agree), FALSE_ALARM / 3, "rise of the risk by noise added to the query's label", domain
    )


@LEDGER.claim(
    "multihead:3.1a",
    "mini-batch training follows the population gradient",
    r"\theta_{t+1}\leftarrow UpdateMethod(\theta_t,\hat\nabla\mathcal L(\theta_t))",
    reading="checked as: the mini-batch gradient in (omega, mu) has the population gradient as its mean",
)
def minibatch_gradient() -> Iterator[Evidence]:
    scores = []
    for index, (task, omega, mu) in enumerate(((PAPER, (0.15, -0.1), (2.0, -2.5)), (RegressionTask(20, 12, 0.0), (0.1, -0.12), (1.5, -1.0)))):  # fmt: skip
        w, m = np.array(omega), np.array(mu)
        X, y, query, label = sample(task, 40_000, stream(31, "multihead:3.1a", index))
        scores_of_tokens = np.einsum("nld,nd->nl", X, query)
        p = softmax(scores_of_tokens[:, np.newaxis, :] * w[:, np.newaxis], axis=-1)
        value = np.einsum("nhl,nl->nh", p, y)
        tilt = np.einsum("nhl,nl->nh", p, y * scores_of_tokens) - value * np.einsum("nhl,nl->nh", p, scores_of_tokens)
        miss = (label - value @ m)[:, np.newaxis]
        sampled = np.hstack([-2 * miss * m * tilt, -2 * miss * value])
        gradient = exact.risk_derivatives(task, w, m).gradient
        scores += [z_score(sampled[:, i], gradient[i]) for i in range(4)]
    yield statistical(
        worst_score(scores), FALSE_ALARM / 8, "mean gradient against risk_derivatives", "(5,40,0.1) and (20,12,0)"
    )


@LEDGER.claim(
    "multihead:3.1",
    "diagonal KQ and last-entry OV circuits",
    r"KQ^{(h)}=\begin{bmatrix}\omega^{(h)}I_d&*\\0^\top&*\end{bmatrix},\quad OV^{(h)}=\begin{bmatrix}*&*\\0^\top&\mu^{(h)}\end{bmatrix}",
    reading="as a set on which population training stays: the gradient of (2.5) has no component that leaves it",
)
def circuit_pattern() -> Iterator[Evidence]:
    scores: list[float] = []
    for index, (d, L, noise) in enumerate(((2, 6, 0.5), (5, 40, 0.1))):
        task = RegressionTask(d, L, noise)
        X, y, query, label = sample(task, 30_000, stream(31, "multihead:3.1", index))
        logits = np.einsum("nld,nd->nl", X, query)
        omega, mu = np.array([0.4, -0.2]), np.array([1.0, -2.0])
        p = softmax(logits[:, np.newaxis, :] * omega[:, np.newaxis], axis=-1)
        value = np.einsum("nhl,nl->nh", p, y)
        miss = -2 * (label - value @ mu)
        mean_token = np.einsum("nhl,nld->nhd", p, X)
        for head in range(2):
            tilt = p[:, head] * (y - value[:, head, np.newaxis])
            by_score = np.einsum("nl,nld->nd", tilt, X) * (miss * mu[head])[:, np.newaxis]
            by_kq = by_score[:, :, np.newaxis] * query[:, np.newaxis, :]
            by_last_row = (miss * mu[head] * np.sum(tilt * y, axis=1))[:, np.newaxis] * query
            scores += [z_score(by_kq[:, i, j], 0.0) for i in range(d) for j in range(d) if i != j]
            scores += [z_score(by_kq[:, 0, 0] - by_kq[:, i, i], 0.0) for i in range(1, d)]
            scores += [z_score(by_last_row[:, i], 0.0) for i in range(d)]
            scores += [z_score(miss * mean_token[:, head, i], 0.0) for i in range(d)]
    yield statistical(
        worst_score(scores), FALSE_ALARM / len(scores), "gradient components that leave the pattern",
        "two heads; (2,6,0.5) and (5,40,0.1); off-diagonal and unequal diagonal KQ, last KQ row, first OV entries",
    )  # fmt: skip


@LEDGER.claim(
    "multihead:3.2",
    "the predictor is a sum of kernel regressors",
    r"\hat y_q=\sum_h\mu^{(h)}\langle y,smax(\omega^{(h)}Xx_q)\rangle=\sum_h\mu^{(h)}\sum_\ell\frac{y_\ell e^{\omega^{(h)}x_\ell^\top x_q}}{\sum_\ell e^{\omega^{(h)}x_\ell^\top x_q}}",
)
def sum_of_kernels() -> Iterator[Evidence]:
    error = 0.0
    for index, (d, L, heads) in enumerate(((1, 3, 1), (5, 40, 2), (12, 6, 4))):
        rng = stream(32, "multihead:3.2", index)
        X, y, query = rng.standard_normal((L, d)), rng.standard_normal(L), rng.standard_normal(d)
        omega, mu = rng.standard_normal((2, heads))
        # The circuits of (3.1), with arbitrary numbers where the pattern has stars.
        OV, KQ = rng.standard_normal((2, heads, d + 1, d + 1))
        KQ[:, :, :d] = 0
        KQ[:, np.arange(d), np.arange(d)] = omega[:, np.newaxis]
        OV[:, d, :d], OV[:, d, d] = 0, mu
        full = _masked_layer(_embedding(X, y, query), OV, KQ)[d, L]
        kernels = np.exp(np.multiply.outer(omega, X @ query))
        printed = float(np.sum(mu * (kernels @ y) / kernels.sum(axis=1)))
        ours = float(descent.softmax_prediction(X, y, query, omega, mu))
        error = max(error, abs(full - printed), abs(ours - printed))
    yield Evidence(
        Method.NUMERIC, error, 1e-11, "error against the layer (2.2) with circuits (3.1)", "d 1-12, L 3-40, H 1-4"
    )


def best_three_heads() -> exact.MergedModel:
    """The best three heads that `optimum` finds: a limit, in which two merge with μ -> +-inf."""
    omega = best_heads(PAPER, 3).omega
    return exact.merged_risk(PAPER, omega[:-1], float(omega[-1]))


@LEDGER.claim(
    "multihead:obs-1",
    "sign matching for any number of heads",
    r"\forall H\ge1,\ h\in[H]:\quad sign(\omega^{(h)})=sign(\mu^{(h)})",
    measurement=True,
    reading="of the minimiser of (2.5) for one and two heads, within 1e-4 of its risk for three; the form is multihead:3.1",
)
def sign_matching() -> Iterator[Evidence]:
    printed = sum(float(np.sign(w) != np.sign(m)) for w, m in (ONE_HEAD, TWO_HEADS, (-TWO_HEADS[0], -TWO_HEADS[1])))
    yield Evidence(Method.EXACT, printed, 0.0, "printed heads with unequal signs", "trained one and two heads")
    wrong = 0.0
    for task in (PAPER, RegressionTask(2, 100, 0.0), RegressionTask(30, 20, 0.5)):
        for heads in (1, 2):
            best = best_heads(task, heads)
            wrong += float(np.sum(best.omega * best.mu <= 0))
    yield Evidence(Method.NUMERIC, wrong, 0.0, "heads with unequal signs at the exact optimum", "H 1, 2; three tasks")
    # Three heads do best as a pair merges at a small negative omega; on either side of zero its signs match.
    omega = np.array([1.6233, 0.002, -0.0278])
    mu, risk = exact.optimal_mu(PAPER, omega)
    mismatched = float(np.sum(omega * mu <= 0))
    yield Evidence(
        Method.NUMERIC,
        mismatched,
        0.0,
        "heads with unequal signs of three heads near their best",
        "omega 1.6233, 0.002, -0.0278",
    )
    yield Evidence(
        Method.NUMERIC,
        risk.value / best_three_heads().risk - 1,
        1e-4,
        "their risk over the limit's, minus one",
        "(5,40,0.1)",
    )


@LEDGER.claim(
    "multihead:obs-2",
    "homogeneous KQ scaling and zero-sum OV",
    r"H\ge2:\quad|\omega^{(h)}|\approx\gamma\ \forall h\in\mathcal H_+\cup\mathcal H_-,\qquad\langle\mu,1_H\rangle\approx0",
    measurement=True,
    reading="of the minimiser of (2.5), within 10 %",
)
def homogeneous_and_zero_sum() -> Iterator[Evidence]:
    gap = float(effective_mu(PAPER, TWO_HEADS[0])) / TWO_HEADS[1] - 1
    yield Evidence(
        Method.NUMERIC, gap, APPROXIMATELY, "printed mu against (4.6) at the printed omega", "trained two heads"
    )
    spread = 0.0
    for task in (PAPER, RegressionTask(2, 100, 0.0), RegressionTask(30, 20, 0.5)):
        best = best_heads(task, 2)
        spread = max(
            spread, abs(best.omega.sum()) / best.omega[0], abs(best.mu.sum()) / best.mu[0], -float(best.curvatures[0])
        )
    yield Evidence(Method.NUMERIC, spread, 1e-9, "asymmetry of the exact two-head optimum", "H 2; three tasks")
    three = best_three_heads()
    uneven = float(np.ptp(np.abs(three.omega)) / np.abs(three.omega).max()) * float(
        three.risk < best_heads(PAPER, 2).risk.value
    )
    yield Evidence(
        Method.NUMERIC, uneven, APPROXIMATELY, "spread of |omega| of better three heads", "H 3; (5,40,0.1)"
    )


@LEDGER.correction(
    "multihead:obs-2",
    Relation.OVERCLAIM,
    r"\text{exact at the minimum for }H=2;\text{ for }H=3\text{ unequal }|\omega|\text{ is better, by }0.3\,\%\text{ of the risk at }(5,40,0.1)",
    "the gain is too small for the printed training runs to show",
)
def opposite_pair_is_nearly_best() -> Iterator[Evidence]:
    two, three = best_heads(PAPER, 2).risk.value, best_three_heads().risk
    yield Evidence(
        Method.NUMERIC, two / three - 1, 0.005, "relative gain of three heads over the best pair", "(5,40,0.1)"
    )
    yield Evidence(
        Method.NUMERIC, max(three - two, 0.0), 0.0, "loss of three heads against the best pair", "(5,40,0.1)"
    )
    # At fixed total weights, moving two opposite heads apart in |omega| or in sum raises the exact risk.
    best = best_heads(PAPER, 2)
    shift = 0.05 * best.omega[0]
    moved = exact.softmax_risks(
        PAPER, [best.omega + shift, best.omega, best.omega], [best.mu, best.mu + 0.05 * best.mu[0], best.mu]
    )
    yield Evidence(
        Method.NUMERIC,
        max(0.0, float(moved[2] - moved[:2].min())),
        0.0,
        "gain by breaking either pattern by 5 %",
        "H 2; (5,40,0.1)",
    )


@LEDGER.claim(
    "multihead:obs-3",
    "two heads outperform one",
    r"\min_{\omega,\mu\in\mathbb R^2}\mathcal L<\min_{\omega,\mu\in\mathbb R}\mathcal L",
    reading="of the minimisers of (2.5), and of the printed trained models",
)
def two_heads_outperform() -> Iterator[Evidence]:
    worst = -np.inf
    for task in (PAPER, RegressionTask(2, 100, 0.0), RegressionTask(30, 20, 0.5), RegressionTask(300, 100, 0.01)):
        worst = max(worst, best_heads(task, 2).risk.value / best_heads(task, 1).risk.value)
    yield Evidence(
        Method.SWEEP,
        worst,
        0.999,
        "largest ratio of two-head to one-head risk",
        "(5,40,0.1) (2,100,0) (30,20,0.5) (300,100,0.01)",
    )
    w, m = TWO_HEADS
    two, one = (
        exact.softmax_risk(PAPER, [w, -w], [m, -m]).value,
        exact.softmax_risk(PAPER, [ONE_HEAD[0]], [ONE_HEAD[1]]).value,
    )
    yield Evidence(Method.NUMERIC, two / one, 0.999, "the same ratio of the printed trained models", "(5,40,0.1)")


def _against_vanilla(task: RegressionTask) -> float:
    """Relative distance of the debiased (γ → 0) risk from that of vanilla descent with step one."""
    best = float(descent.debiased_step_risk(task, descent.debiased_step(task)))
    return float(descent.vanilla_step_risk(task, 1.0)) / best - 1


@LEDGER.claim(
    "multihead:obs-3-vanilla",
    "multi-head attention approximates vanilla gradient descent",
    r"\mathcal E(\hat y_q)\approx\mathcal E(\hat y^{vgd}),\quad\hat y^{vgd}=L^{-1}\sum_\ell x_\ell^\top x_q\,y_\ell",
    reading="risks within 10 %; multi-head by its limit of small gamma; the step of the print is one",
)
def near_vanilla() -> Iterator[Evidence]:
    for task in (PAPER, RegressionTask(5, 200, 0.1), RegressionTask(40, 20, 0.5)):
        domain = f"({task.dim},{task.context},{task.noise:g})"
        yield Evidence(
            Method.NUMERIC, _against_vanilla(task), APPROXIMATELY, "relative distance of the risks", domain
        )


@LEDGER.correction(
    "multihead:obs-3-vanilla",
    Relation.CONDITIONS,
    r"d(1+\sigma^2)/L\le0.14\text{ and }\sigma^2\ge0.1;\quad\text{at }d/L=2\text{ step one has 2.8 times the risk}",
    "with a step of one the risk grows as d/L without bound, while the heads shrink their step",
)
def near_vanilla_when_long() -> Iterator[Evidence]:
    worst = 0.0
    for dim, noise in ((1, 0.1), (5, 0.1), (50, 0.1), (400, 0.1), (20, 0.5), (20, 1.0)):
        for context in (int(np.ceil(dim * (1 + noise) / 0.14)), 50 * dim):
            if context >= 20:
                worst = max(worst, abs(_against_vanilla(RegressionTask(dim, context, noise))))
    yield Evidence(
        Method.SWEEP,
        worst,
        APPROXIMATELY,
        "largest relative distance of the risks",
        "d 1-400, noise 0.1-1, context >= 20",
    )


@LEDGER.claim(
    "multihead:obs-3-length",
    "softmax attention generalises in length",
    r"\mathcal E_{L'}(\hat y_q)\text{ decreases as }L'\text{ increases beyond and below the training length }L",
    reading="exact risks of the printed trained models at other context lengths, 10 to 400",
)
def length_generalisation() -> Iterator[Evidence]:
    contexts = (10, 16, 25, 40, 60, 100, 200, 400)
    w, m = TWO_HEADS
    rise = -np.inf
    for omega, mu in (((ONE_HEAD[0],), (ONE_HEAD[1],)), ((w, -w), (m, -m))):
        risks = [exact.softmax_risk(RegressionTask(5, L, 0.1), omega, mu).value for L in contexts]
        rise = max(rise, float(np.diff(risks).max()))
    yield Evidence(
        Method.SWEEP,
        max(rise, 0.0),
        0.0,
        "largest rise of the risk with length",
        "trained one and two heads, L' 10-400",
    )
    steep = -np.inf
    for task in REGIMES:
        lengths = np.unique(np.geomspace(2, 10**5, 60).astype(int))
        steep = max(
            steep, float(np.diff(descent.softmax_length_risk(task, descent.debiased_step(task), lengths)).max())
        )
    yield Evidence(
        Method.SWEEP, max(steep, 0.0), 0.0, "the same of small gamma at the best step", f"{REGIME_TEXT}, L' 2-10^5"
    )


@LEDGER.claim(
    "multihead:obs-3-bayes",
    "comparable to the Bayes estimator up to a proportionality factor",
    r"\mathcal E(\hat y_q)\le C\cdot BayesRisk",
    reading="as one constant for all d, L and noise, read as 10",
)
def near_bayes() -> Iterator[Evidence]:
    for task in (PAPER, RegressionTask(50, 100, 0.1), RegressionTask(50, 100, 0.001), RegressionTask(5, 40, 1e-4)):
        ratio = bayes.debiased_bayes_ratio(task).value
        yield Evidence(
            Method.NUMERIC,
            ratio,
            10.0,
            "risk of debiased descent over Bayes risk",
            f"({task.dim},{task.context},{task.noise:g})",
        )


@LEDGER.correction(
    "multihead:obs-3-bayes",
    Relation.CONDITIONS,
    r"\text{at fixed }\sigma^2>0:\ \text{ratio}\le1+\frac1{4\sigma^2(1+\sigma^2)}+O(1/L);\text{ no constant serves as }\sigma^2\to0",
    "one step of descent leaves a bias d/L that Bayes does not have",
)
def near_bayes_when_noisy() -> Iterator[Evidence]:
    worst = 0.0
    for noise in (0.1, 0.5, 2.0):
        limit = 1 + 1 / (4 * noise * (1 + noise))
        for dim, context in ((2, 200), (20, 40), (60, 60), (100, 30)):
            ratio = bayes.debiased_bayes_ratio(RegressionTask(dim, context, noise)).value
            # Of the 1/L terms only 1/(noise L) and a few more survive; 2/L bounds them at these noises.
            worst = max(worst, (ratio - limit) * context * noise)
    yield Evidence(
        Method.SWEEP, max(worst, 0.0), 2.0, "excess over the bound, times L noise", "d 2-100, L 30-200, noise 0.1-2"
    )
    small = bayes.debiased_bayes_ratio(RegressionTask(5, 40, 1e-4)).value * 1e-4
    yield Evidence(Method.NUMERIC, 0.1 / small, 1.0, "0.1 over (ratio times noise) at noise 1e-4", "(5,40)")


@LEDGER.claim(
    "multihead:obs-4",
    "the KQ scale rises and falls, the OV scale only rises",
    r"|\omega^{(h)}|\text{ first increases, then decreases; }\sum_{h\in\mathcal H_+}\mu^{(h)}\text{ increases monotonically}",
    reading="on the flow of the approximate loss of two opposite heads from a small start",
)
def rise_and_fall() -> Iterator[Evidence]:
    turns, falls = 0.0, 0.0
    times = np.concatenate([np.linspace(0, 12, 241), np.geomspace(12.1, 1e4, 120)])
    for task in (PAPER, RegressionTask(2, 1000, 0.0), RegressionTask(50, 25, 0.5), RegressionTask(200, 200, 0.1)):
        path = flow.gradient_flow(task, [0.01, -0.01], [0.02, -0.02], times)
        w, m = path.omega[:, 0], path.mu[:, 0]
        peak = int(np.argmax(w))
        turns += float((np.diff(w[: peak + 1]) <= 0).sum() + (np.diff(w[peak:]) >= 0).sum()) + float(
            peak in (0, w.size - 1)
        )
        falls = max(falls, float(-np.diff(m).min()))
    domain = "(5,40,0.1) (2,1000,0) (50,25,0.5) (200,200,0.1), time 0 to 10^4"
    yield Evidence(Method.SWEEP, turns, 0.0, "records of |omega| out of order", domain)
    yield Evidence(Method.SWEEP, max(falls, 0.0), 0.0, "largest fall of mu", domain)


@LEDGER.claim(
    "multihead:4.1a",
    "the trained single head",
    r"\omega^{(1)}\approx0.52\approx1/\sqrt d,\quad\mu^{(1)}\asymp\sqrt d",
    measurement=True,
    reading="'approximately' is read as within 10 %",
)
def trained_single_head() -> Iterator[Evidence]:
    yield Evidence(
        Method.EXACT, ONE_HEAD[0] * np.sqrt(5) - 1, APPROXIMATELY, "0.52 over 1/sqrt(5), minus one", "d = 5"
    )


@LEDGER.correction(
    "multihead:4.1a",
    Relation.OVERCLAIM,
    r"\omega^*=0.517905,\ \mu^*=1.49709\text{ exactly at }(5,40,0.1);\quad\omega^*\sqrt d\to1\text{ only as }d\to\infty",
    "the printed 0.52 is the exact optimum, 16 % above 1/sqrt(d), which minimises the approximate loss (4.1) only",
)
def exact_single_head() -> Iterator[Evidence]:
    best = best_heads(PAPER, 1)
    yield Evidence(
        Method.NUMERIC, best.omega[0] - 0.517905, 5.1e-7, "exact omega against the stated digits", "(5,40,0.1)"
    )
    yield Evidence(Method.NUMERIC, best.mu[0] - 1.49709, 5.1e-6, "exact mu against the stated digits", "(5,40,0.1)")
    yield Evidence(
        Method.NUMERIC, ONE_HEAD[0] / best.omega[0] - 1, 0.01, "printed 0.52 against the exact omega", "(5,40,0.1)"
    )
    ratios = [
        exact.optimum(RegressionTask(d, 8 * d, 0.1), 1).omega[0]
        / single_head_optimum(RegressionTask(d, 8 * d, 0.1))[0]
        for d in (5, 20, 80, 320)
    ]
    yield Evidence(Method.NUMERIC, 0.1 / (ratios[0] - 1), 1.0, "0.1 over (omega sqrt(d) - 1)", "(5,40,0.1)")
    yield Evidence(
        Method.SWEEP, float(np.abs(np.array(ratios[2:]) - 1).max()), 0.02, "omega sqrt(d) - 1", "d 80, 320; L = 8 d"
    )
