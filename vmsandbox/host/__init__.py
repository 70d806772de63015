"""Owns facts about this host and its mending: accelerator, daemons, programs, the doctor's checks.

Knows no libvirt API; what libvirt says arrives as values.
"""
