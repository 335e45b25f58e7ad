"""Toolkit of kernel authors: launchers, compilation ahead of time and on-disk caches."""
