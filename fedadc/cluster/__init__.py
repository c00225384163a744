"""Simulation on a Ray cluster: the same messages and the same order of additions as with worker processes."""

from fedadc.cluster.settings import RayCluster

__all__ = ["RayCluster"]
