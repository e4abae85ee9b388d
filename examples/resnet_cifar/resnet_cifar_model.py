"""ResNet for CIFAR-10, as in the TensorFlow model garden: 6n + 2 layers, a projection for each stage."""

L2_WEIGHT_DECAY = 2e-4
BATCH_NORM_DECAY = 0.997
BATCH_NORM_EPSILON = 1e-5


def resnet(keras, resnet_size=56, classes=10):
    """A model of `keras`: Keras 3, or Keras 2 as `tf_keras`."""
    if (resnet_size - 2) % 6:
        raise ValueError(f"resnet_size={resnet_size}: it is 6n + 2, such as 20, 32, 44 or 56.")
    layers, regularizer = keras.layers, keras.regularizers.L2(L2_WEIGHT_DECAY)

    def conv(x, filters, size, strides, padding="same"):
        return layers.Conv2D(
            filters,
            size,
            strides,
            padding,
            use_bias=False,
            kernel_initializer="he_normal",
            kernel_regularizer=regularizer,
        )(x)

    def norm(x):
        return layers.BatchNormalization(momentum=BATCH_NORM_DECAY, epsilon=BATCH_NORM_EPSILON)(x)

    def block(x, filters, strides, project):
        inner = layers.Activation("relu")(norm(conv(x, filters, 3, strides)))
        inner = norm(conv(inner, filters, 3, 1))
        shortcut = norm(conv(x, filters, 1, strides)) if project else x
        return layers.Activation("relu")(layers.add([inner, shortcut]))

    image = layers.Input((32, 32, 3))
    x = conv(layers.ZeroPadding2D(1)(image), 16, 3, 1, padding="valid")
    x = layers.Activation("relu")(norm(x))
    for filters, strides in ((16, 1), (32, 2), (64, 2)):
        for number in range((resnet_size - 2) // 6):
            x = block(x, filters, strides if number == 0 else 1, project=number == 0)
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dense(
        classes,
        activation="softmax",
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),
        kernel_regularizer=regularizer,
        bias_regularizer=regularizer,
    )(x)
    return keras.Model(image, x, name=f"resnet{resnet_size}")
