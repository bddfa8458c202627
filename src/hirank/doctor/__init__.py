"""Preflight for a model, its adapter and its training setup: traps named before they cost a night.

    finding.py   what is found, and the report of it
    trap.py      one trap: when it is met, what mends it, who reported it
    subject.py   what is examined
    probe.py     a forward of the batch, to see which layers run
    settings.py  what a trainer's configuration says that matters here
    layers.py    the adapted layers of a model, seen through PEFT
    gradients.py, precision.py, shapes.py, targets.py, state.py, files.py, batch.py   the traps
    registry.py  all of them, in one list
    examine.py   `diagnose`
    command.py   `hirank doctor`

A trap reports what it computed from the weights, files and settings at hand. What is not at hand
(no optimizer, no batch, no values on the meta device) it says nothing about.
"""

from hirank.doctor.examine import diagnose
from hirank.doctor.finding import Finding, Report

__all__ = ["Finding", "Report", "diagnose"]
