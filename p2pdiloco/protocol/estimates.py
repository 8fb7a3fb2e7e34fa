"""Estimates of times from samples."""

from __future__ import annotations


def smoothed(mean_s: float, variation_s: float, sample_s: float) -> tuple[float, float]:
    """The new mean and variation after one more sample (RFC 6298's estimator). A mean of 0: it is the first."""
    if mean_s == 0.0:
        return sample_s, sample_s / 2
    variation_s += 0.25 * (abs(sample_s - mean_s) - variation_s)
    return mean_s + 0.125 * (sample_s - mean_s), variation_s
