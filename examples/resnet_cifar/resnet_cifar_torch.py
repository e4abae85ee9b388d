"""The network of resnet_cifar_model.py in PyTorch."""

from torch import nn


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs, filters, stride, project):
        super().__init__()
        self.inner = nn.Sequential(
            *conv(inputs, filters, 3, stride), nn.ReLU(), *conv(filters, filters, 3, 1)
        )
        self.shortcut = nn.Sequential(*conv(inputs, filters, 1, stride)) if project else nn.Identity()

    def forward(self, x):
        return nn.functional.relu(self.inner(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Logits of images (rows, 32, 32, 3)."""

    def __init__(self, resnet_size=56, classes=10):
        super().__init__()
        blocks, inputs = [], 16
        for filters, stride in ((16, 1), (32, 2), (64, 2)):
            for number in range((resnet_size - 2) // 6):
                blocks.append(Block(inputs, filters, stride if number == 0 else 1, number == 0))
                inputs = filters
        self.layers = nn.Sequential(*conv(3, 16, 3, 1), nn.ReLU(), *blocks)
        self.head = nn.Linear(64, classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, images):
        return self.head(self.layers(images.permute(0, 3, 1, 2)).mean((2, 3)))


def conv(inputs, filters, size, stride):
    """A convolution and its normalisation."""
    layer = nn.Conv2d(inputs, filters, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight)
    return layer, nn.BatchNorm2d(filters, eps=1e-5, momentum=0.003)


def parameter_groups(model):
    """Weight decay only for convolutions and the last layer. L2(2e-4) of Keras is 4e-4 here."""
    decayed = [p for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear)) for p in m.parameters()]
    others = [p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()]
    return [{"params": decayed, "weight_decay": 4e-4}, {"params": others}]
