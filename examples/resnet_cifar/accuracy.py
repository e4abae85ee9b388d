"""Does training on two nodes reach the accuracy of training on one? ResNet-20, 20 epochs."""

import argparse
import sys
from pathlib import Path

from kindler import cluster

sys.path.insert(0, str(Path(__file__).parent))
import resnet_cifar_dist

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--least", type=float, default=0.0, help="fail below this accuracy")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    flags = [
        f"--data_dir={args.data_dir}",
        f"--train_epochs={args.epochs}",
        f"--batch_size={args.batch_size}",
        "--resnet_size=20",
        "--ds=multi_worker_mirrored",
    ]
    reached = {}
    for nodes in args.nodes:
        with cluster.run(resnet_cifar_dist.main_fun, flags, nodes, start_timeout_s=600) as running:
            pass
        reached[nodes] = running.return_values[0]["accuracy"]
    for nodes, accuracy in reached.items():
        print(f"{nodes} nodes: test accuracy {accuracy:.4f}")
    sys.exit(min(reached.values()) < args.least)
