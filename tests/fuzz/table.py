"""The table of all fuzz targets."""

from fuzz import etcd_targets, http_targets, log_targets, store_targets
from fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        *store_targets.TARGETS,
        *etcd_targets.TARGETS,
        *log_targets.TARGETS,
        *http_targets.TARGETS,
    )
}
