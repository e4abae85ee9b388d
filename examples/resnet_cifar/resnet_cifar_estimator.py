"""The same network through an estimator: no strategy, no TF_CONFIG, Keras or PyTorch."""

import argparse
from pathlib import Path

import numpy as np
from resnet_cifar_model import resnet

import kindler


def arrays(folder, names, rows):
    """Standardised images (rows, 32, 32, 3) and labels of CIFAR-10's binary files."""
    paths = sorted(Path(folder).glob(names))
    records = np.concatenate([np.fromfile(path, np.uint8).reshape(-1, 3073) for path in paths])[:rows]
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).astype(np.float32)
    images -= images.mean(axis=(1, 2, 3), keepdims=True)
    images /= np.maximum(images.std(axis=(1, 2, 3), keepdims=True), images[0].size ** -0.5)
    return images, records[:, 0].astype(np.int64)


def keras_model(config):
    import keras

    model = resnet(keras, config["resnet_size"])
    model.compile(
        keras.optimizers.SGD(config["lr"], momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def torch_model(config):
    from resnet_cifar_torch import ResNet

    return ResNet(config["resnet_size"])


def torch_optimizer(model, config):
    import torch
    from resnet_cifar_torch import parameter_groups

    return torch.optim.SGD(parameter_groups(model), lr=config["lr"], momentum=0.9)


def main(args):
    config = {"resnet_size": args.resnet_size, "lr": 0.1 * args.batch_size / 128}
    if args.framework == "keras":
        estimator = kindler.Estimator.from_keras(model=keras_model, config=config, workers=args.workers)
    else:
        from torch import nn

        estimator = kindler.Estimator.from_torch(
            model=torch_model,
            optimizer=torch_optimizer,
            loss=nn.CrossEntropyLoss(),
            metrics=["accuracy"],
            config=config,
            workers=args.workers,
        )
    train, test = (
        arrays(args.data_dir, names, args.rows) for names in ("data_batch_*.bin", "test_batch.bin")
    )
    estimator.fit(train, epochs=args.train_epochs, batch_size=args.batch_size)
    print(f"test accuracy: {estimator.evaluate(test, verbose=0)['accuracy']:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=("keras", "torch"), default="keras")
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--train_epochs", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--resnet_size", type=int, default=56)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, help="use the first rows only")
    main(parser.parse_args())
