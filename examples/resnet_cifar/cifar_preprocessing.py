"""CIFAR-10 in its binary format as a `tf.data.Dataset`.

A record has 3,073 bytes: the label, then 32 x 32 red, green and blue values.
"""

import os

import tensorflow as tf

HEIGHT = WIDTH = 32
NUM_CHANNELS = 3
NUM_CLASSES = 10
RECORD_BYTES = 1 + HEIGHT * WIDTH * NUM_CHANNELS


def get_filenames(is_training, data_dir):
    """The files of the training or of the test set."""
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] if is_training else ["test_batch.bin"]
    paths = [os.path.join(data_dir, name) for name in names]
    missing = [path for path in paths if not tf.io.gfile.exists(path)]
    if missing:
        raise FileNotFoundError(f"{missing[0]}: --data_dir is the folder of CIFAR-10's binary version.")
    return paths


def count_images(is_training, data_dir):
    """The number of images."""
    sizes = [tf.io.gfile.stat(path).length for path in get_filenames(is_training, data_dir)]
    return sum(size // RECORD_BYTES for size in sizes)


def parse_record(raw_record, is_training):
    """The image of a record, and its label."""
    record = tf.io.decode_raw(raw_record, tf.uint8)
    label = tf.cast(record[0], tf.int32)
    depth_major = tf.reshape(record[1:], [NUM_CHANNELS, HEIGHT, WIDTH])
    image = tf.cast(tf.transpose(depth_major, [1, 2, 0]), tf.float32)
    return preprocess_image(image, is_training), label


def preprocess_image(image, is_training):
    """Randomly crop and flip for training; always standardise."""
    if is_training:
        image = tf.image.resize_with_crop_or_pad(image, HEIGHT + 8, WIDTH + 8)
        image = tf.image.random_crop(image, [HEIGHT, WIDTH, NUM_CHANNELS])
        image = tf.image.random_flip_left_right(image)
    return tf.image.per_image_standardization(image)


def input_fn(is_training, data_dir, batch_size, num_workers=1, worker=0, seed=None):
    """Batches of images and labels: endless for training, each image once for evaluation.

    Each worker reads its own part of the records. `batch_size` counts the rows of all workers, and
    `tf.distribute` divides it.
    """
    dataset = tf.data.FixedLengthRecordDataset(get_filenames(is_training, data_dir), RECORD_BYTES)
    dataset = dataset.shard(num_workers, worker)
    if is_training:
        dataset = dataset.shuffle(count_images(is_training, data_dir), seed=seed).repeat()
    dataset = dataset.map(lambda raw: parse_record(raw, is_training), num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.batch(batch_size, drop_remainder=is_training).prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    # It is sharded already.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)
