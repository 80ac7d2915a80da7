"""A Ray cluster of several nodes on this machine, on which an index is made and a TorchTrainer runs twice.

python ray_cluster_job.py FOLDER DATA

The index loses a worker and a node on the way. The first run is elastic, and loses a worker and then a whole node; the second has another number of workers.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray_index_job import index
from ray_train_job import END, LOSE_AT, STOP_AT, train, wait_for

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}
HEAD = {
    "num_cpus": 0,
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
    "_system_config": {
        "prestart_worker_first_driver": False,  # Ray Train would not use them
        "worker_maximum_startup_concurrency": 4,  # one at a time on a node of one CPU
        # A node that has gone is found so within a second; one that is slow is not taken for it.
        "health_check_initial_delay_ms": 300,
        "health_check_period_ms": 300,
        "health_check_failure_threshold": 2,
        "health_check_timeout_ms": 120_000,
    },
}


def start_cluster() -> Cluster:
    """Every node has a loopback address of its own. 127.0.0.1 would not do: Ray replaces it by that of the machine."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, **HEAD, "node_ip_address": "127.0.0.2"})
    for number in (3, 4):
        cluster.add_node(**NODE, node_ip_address=f"127.0.0.{number}")
    ray.init(address=cluster.address, _node_ip_address="127.0.0.2", log_to_driver=False)
    return cluster


def lose_a_node(cluster: Cluster, folder: Path) -> None:
    """When all ranks have begun the step, remove the node of one of them."""

    def nodes() -> list[str]:
        lines = (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
        return [line["node"] for line in map(json.loads, lines) if line.get("step") == LOSE_AT]

    wait_for(lambda: len(nodes()) == 2)
    node = next(node for node in cluster.worker_nodes if node.node_id in nodes())
    cluster.remove_node(node, allow_graceful=False)
    cluster.wait_for_nodes()
    # Only every 20 s does Ray count its nodes to decide on the number of workers; it is told to do so now.
    coordinator = ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator")
    ray.get(coordinator.get_reserved_resources.remote("", recompute=True))
    (folder / "lost").write_text(node.node_id)


def fit(folder: Path, data: str, workers: int | tuple[int, int], cpus: float, until: int) -> None:
    TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "data": data, "until": until},
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": cpus}),
        run_config=RunConfig(
            name=f"until-{until}", storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()


def main(folder: Path, data: str) -> None:
    cluster = start_cluster()
    spare = cluster.add_node(**NODE, node_ip_address="127.0.0.5")
    index(folder, lambda: cluster.remove_node(spare, allow_graceful=False))
    threading.Thread(target=lose_a_node, args=(cluster, folder), daemon=True).start()
    fit(folder, data, workers=(1, 2), cpus=1, until=STOP_AT)
    fit(folder, data, workers=3, cpus=0.3, until=END)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
