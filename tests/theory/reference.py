"""High-precision references: recurrences in ball arithmetic, precision doubled until the balls are small."""

from flint import arb, ctx

# Relative accuracy that a reference must have before it is believed.
REFERENCE_BITS = 60


def free_risks(eigenvalues, teacher, depth):
    """Free risks at depths 0..depth for spectra given as lists of fractions or of pairs (base, exponent)."""
    precision = 256
    while True:
        risks = _free_risks(eigenvalues, teacher, depth, precision)
        if all(risk.rel_accuracy_bits() > REFERENCE_BITS for risk in risks):
            return [float(risk) for risk in risks]
        precision *= 2


def power_law(exponent, dim):
    """k^-exponent for k = 1..dim, to be evaluated at any precision."""
    return [(k, -exponent) for k in range(1, dim + 1)]


def _number(value):
    if isinstance(value, tuple):
        return arb(value[0]) ** arb(value[1])
    return arb(value)


def _free_risks(eigenvalues, teacher, depth, precision):
    old, ctx.prec = ctx.prec, precision
    try:
        nodes = [_number(value) for value in eigenvalues]
        weights = [node * _number(value) for node, value in zip(nodes, teacher, strict=True)]
        norm = sum(weights, arb(0)).sqrt()
        previous, current = [arb(0)] * len(nodes), [1 / norm] * len(nodes)
        previous_end, end, beta = arb(0), 1 / norm, arb(0)
        total = end * end
        risks = [1 / total]
        for _ in range(depth):
            alpha = sum((w * x * p * p for w, x, p in zip(weights, nodes, current, strict=True)), arb(0))
            step = [(x - alpha) * p - beta * q for x, p, q in zip(nodes, current, previous, strict=True)]
            step_end = -alpha * end - beta * previous_end
            beta = sum((w * s * s for w, s in zip(weights, step, strict=True)), arb(0)).sqrt()
            previous, current = current, [s / beta for s in step]
            previous_end, end = end, step_end / beta
            total += end * end
            risks.append(1 / total)
        return risks
    finally:
        ctx.prec = old
