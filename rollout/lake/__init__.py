"""The lake: schemas, staging, publishing, reading.

from rollout.lake import scan_samples
scan_samples("./lake", batch="nightly-20261025t0230p0200").collect()
"""

from rollout.lake.paths import LakePaths
from rollout.lake.reading import scan_batches, scan_parity, scan_samples, scan_trajectories

__all__ = ["LakePaths", "scan_batches", "scan_parity", "scan_samples", "scan_trajectories"]
