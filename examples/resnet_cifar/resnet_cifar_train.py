"""Code shared by both programs: flags, strategy, training, evaluation."""

import os
import tempfile

import tensorflow as tf
import tf_keras  # Keras 3 has no MultiWorkerMirroredStrategy
from absl import flags
from cifar_preprocessing import count_images, input_fn
from resnet_cifar_model import resnet

BASE_LEARNING_RATE = 0.1  # for batches of 128
LR_SCHEDULE = ((0.1, 91 / 182), (0.01, 136 / 182))  # (multiplier, fraction of epochs after which it begins)


def define_cifar_flags():
    """The flags of the model garden that matter here."""
    strategies = ["off", "mirrored", "multi_worker_mirrored"]
    folder = "/tmp/cifar10_data/cifar-10-batches-bin"
    flags.DEFINE_string("data_dir", folder, "where data_batch_1.bin is", short_name="dd")
    flags.DEFINE_string("export_dir", None, "where to write the model, as a SavedModel", short_name="ed")
    flags.DEFINE_enum("distribution_strategy", "mirrored", strategies, "how to distribute", short_name="ds")
    flags.DEFINE_integer("num_gpus", 0, "GPUs of each process", short_name="ng")
    flags.DEFINE_integer("train_epochs", 182, "how often to go through the data", short_name="te")
    flags.DEFINE_integer("train_steps", None, "of a single epoch, at most this many steps")
    flags.DEFINE_integer("batch_size", 128, "rows of a step, of all workers together", short_name="bs")
    flags.DEFINE_integer("resnet_size", 56, "layers: 6n + 2", short_name="rs")
    flags.DEFINE_integer("epochs_between_evals", 10, "how often to evaluate", short_name="ebe")
    flags.DEFINE_integer("log_steps", 10, "after how many steps to print their losses")
    flags.DEFINE_integer("seed", 1, "decides the initial weights and the order of rows")


def get_strategy(name, num_gpus):
    """The strategy that --distribution_strategy names."""
    if num_gpus == 0:
        tf.config.set_visible_devices([], "GPU")
    if name == "multi_worker_mirrored":
        return tf.distribute.MultiWorkerMirroredStrategy()  # reads TF_CONFIG
    if name == "off":
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy([f"GPU:{number}" for number in range(num_gpus)] or ["CPU:0"])


class LogSteps(tf_keras.callbacks.Callback):
    """Prints the loss of every step, several on a line: the mean since the epoch began, over all workers."""

    def __init__(self, every):
        super().__init__()
        self.every = every
        self.losses = []
        self.printed = 0

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))
        recent = self.losses[self.printed :]
        if len(recent) == self.every or batch + 1 == self.params["steps"]:
            self.printed = len(self.losses)
            print(f"step {self.printed}: loss", *(f"{loss:.6f}" for loss in recent), flush=True)


def learning_rate(batch_size, epochs, steps_per_epoch):
    """Falls to a tenth after half of the epochs, and to a hundredth after three quarters."""
    initial = BASE_LEARNING_RATE * batch_size / 128
    return tf_keras.optimizers.schedules.PiecewiseConstantDecay(
        boundaries=[round(part * epochs * steps_per_epoch) for _, part in LR_SCHEDULE],
        values=[initial, *(initial * multiplier for multiplier, _ in LR_SCHEDULE)],
    )


def run(flags_obj, export=None):
    """Train and evaluate; `export(model, folder)` saves the model, for a program whose launcher does it."""
    tf_keras.utils.set_random_seed(flags_obj.seed)
    strategy = get_strategy(flags_obj.distribution_strategy, flags_obj.num_gpus)
    worker, workers = place_of(strategy.cluster_resolver)
    steps_per_epoch = count_images(True, flags_obj.data_dir) // flags_obj.batch_size
    epochs = flags_obj.train_epochs
    if epochs <= 1 and flags_obj.train_steps:
        steps_per_epoch = min(flags_obj.train_steps, steps_per_epoch)

    with strategy.scope():
        model = resnet(tf_keras, flags_obj.resnet_size)
        rate = learning_rate(flags_obj.batch_size, epochs, steps_per_epoch)
        model.compile(
            tf_keras.optimizers.SGD(rate, momentum=0.9),
            "sparse_categorical_crossentropy",
            metrics=["sparse_categorical_accuracy"],
        )
    model.distribute_reduction_method = "first"  # Keras adds up the means of all workers by default
    train, test = (
        input_fn(is_training, flags_obj.data_dir, flags_obj.batch_size, workers, worker, flags_obj.seed)
        for is_training in (True, False)
    )
    log = LogSteps(flags_obj.log_steps)
    model.fit(
        train,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        validation_data=test,
        validation_freq=flags_obj.epochs_between_evals,
        callbacks=[log],
        verbose=2,
    )
    loss, accuracy = model.evaluate(test, verbose=0)
    print(f"test loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)
    if flags_obj.export_dir and export is not None:
        export(model, flags_obj.export_dir)
    elif flags_obj.export_dir:
        save_once(model, flags_obj.export_dir, is_first=worker == 0)
    return {"losses": log.losses, "test_loss": loss, "accuracy": accuracy, "parameters": model.count_params()}


def place_of(resolver):
    """This worker's number among the training workers, the chief first, and how many there are."""
    nodes = {} if resolver is None else resolver.cluster_spec().as_dict()
    chiefs, others = len(nodes.get("chief", ())), len(nodes.get("worker", ()))
    if chiefs + others == 0:
        return 0, 1
    return resolver.task_id + (chiefs if resolver.task_type == "worker" else 0), chiefs + others


def save_once(model, export_dir, is_first):
    """All workers save, because saving is collective; all copies but the first are removed."""
    if is_first:
        tf.saved_model.save(model, export_dir)
        return
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(model, os.path.join(folder, "model"))
