"""Twelve networks with the forward pass of their papers' code, at any width: what owners of networks bring.

Each takes a width; `NETWORKS` names them with the shape of their inputs. References: LeNet
(LeCun et al. 1998), VGG (Simonyan & Zisserman 2015), ResNet (He et al. 2016), WRN (Zagoruyko & Komodakis), DenseNet
(Huang et al. 2017), MobileNetV2 (Sandler et al. 2018), SqueezeNet (Iandola et al. 2016), U-Net (Ronneberger et al.
2015), ConvNeXt (Liu et al. 2022), EfficientNet (Tan & Le 2019), ViT (Dosovitskiy et al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def settle(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random batch statistics, as after training; evaluation mode, float64."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            for tensor, low, high in (
                (module.running_mean, -1.0, 1.0),
                (module.running_var, 0.3, 2.0),
                (module.weight.data, -1.5, 1.5),
                (module.bias.data, -1.0, 1.0),
            ):
                tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=generator))
    return model.eval().double()


class LeNet(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 5, padding=2)
        self.conv2 = nn.Conv2d(width, 2 * width, 5)
        self.fc1 = nn.Linear(2 * width * 25, 10 * width)
        self.fc2 = nn.Linear(10 * width, 7 * width)
        self.fc3 = nn.Linear(7 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = F.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = x.view(x.size(0), -1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


class Vgg11(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for step in (1, "M", 2, "M", 4, 4, "M", 8, 8, "M", 8, 8, "M"):
            if step == "M":
                layers.append(nn.MaxPool2d(2, 2))
                continue
            layers += [nn.Conv2d(before, int(step) * width, 3, padding=1), nn.ReLU(inplace=True)]
            before = int(step) * width
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.classifier = nn.Sequential(
            nn.Linear(before, before), nn.ReLU(True), nn.Dropout(),
            nn.Linear(before, before), nn.ReLU(True), nn.Dropout(), nn.Linear(before, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(before, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(before, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def _downsample(before: int, after: int, stride: int) -> nn.Module | None:
    if stride == 1 and before == after:
        return None
    return nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))


class ResNet(nn.Module):
    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], blocks: tuple[int, ...], width: int = 64, stride: int = 1
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        before, stages = width, []
        for i, count in enumerate(blocks):
            stage = []
            for j in range(count):
                stage.append(block(before, width << i, 2 if i and not j else 1))
                before = (width << i) * block.expansion
            stages.append(nn.Sequential(*stage))
        self.stages = nn.ModuleList(stages)
        self.fc = nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in self.stages:
            x = stage(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def small_resnet() -> nn.Module:
    """A ResNet that one core trains on CIFAR-10 in minutes: three blocks at 16, 8 and 4 pixels a side."""
    return ResNet(BasicBlock, (1, 1, 1), 64, stride=2)


class WideBlock(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(before), nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.equal = before == width
        self.shortcut = None if self.equal else nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.equal:
            x = F.relu(self.bn1(x))
        out = F.relu(self.bn1(x)) if self.equal else x
        out = F.relu(self.bn2(self.conv1(out)))
        out = F.dropout(out, p=0.3, training=self.training)
        out = self.conv2(out)
        return torch.add(x if self.shortcut is None else self.shortcut(x), out)


class WideResNet(nn.Module):
    """WRN-16-4: two blocks in each of three stages."""

    def __init__(self, width: int = 16, factor: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        before, blocks = width, []
        for i in range(3):
            for j in range(2):
                blocks.append(WideBlock(before, factor * width << i, 2 if i and not j else 1))
                before = factor * width << i
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(before)
        self.fc = nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.blocks(self.conv1(x))))
        x = F.avg_pool2d(x, x.shape[-1])
        return self.fc(x.view(-1, x.shape[1]))


class DenseLayer(nn.Module):
    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(before), nn.BatchNorm2d(4 * growth)
        self.conv1 = nn.Conv2d(before, 4 * growth, 1, bias=False)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = torch.cat(features, 1)
        x = self.conv1(F.relu(self.norm1(x)))
        return self.conv2(F.relu(self.norm2(x)))


class DenseNet(nn.Module):
    def __init__(self, growth: int = 12, layers: int = 4) -> None:
        super().__init__()
        before = 2 * growth
        self.stem = nn.Conv2d(3, before, 3, padding=1, bias=False)
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for i in range(3):
            self.blocks.append(nn.ModuleList([DenseLayer(before + j * growth, growth) for j in range(layers)]))
            before += layers * growth
            if i < 2:
                norm, conv = nn.BatchNorm2d(before), nn.Conv2d(before, before // 2, 1, bias=False)
                self.transitions.append(nn.Sequential(norm, nn.ReLU(inplace=True), conv, nn.AvgPool2d(2)))
                before //= 2
        self.norm = nn.BatchNorm2d(before)
        self.fc = nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            features = [x]
            for layer in block:
                features.append(layer(features))
            x = torch.cat(features, 1)
            if i < len(self.transitions):
                x = self.transitions[i](x)
        return self.fc(F.relu(self.norm(x)).mean((2, 3)))


class InvertedResidual(nn.Module):
    def __init__(self, before: int, after: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = before * expand
        self.use_res_connect = stride == 1 and before == after
        layers = (
            [] if expand == 1 else [nn.Conv2d(before, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(True)]
        )
        layers += [
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(True),
        ]
        layers += [nn.Conv2d(hidden, after, 1, bias=False), nn.BatchNorm2d(after)]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        if self.use_res_connect:
            return x + self.conv(x)
        return self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6(inplace=True)
        )
        before, blocks = width, []
        for expand, factor, count, stride in ((1, 1, 1, 1), (6, 2, 2, 2), (6, 3, 2, 2), (6, 4, 1, 1)):
            for j in range(count):
                blocks.append(InvertedResidual(before, factor * width, 1 if j else stride, expand))
                before = factor * width
        self.features = nn.Sequential(*blocks)
        self.dropout, self.fc = nn.Dropout(0.2), nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(self.stem(x))
        x = nn.functional.adaptive_avg_pool2d(x, (1, 1))
        return self.fc(self.dropout(torch.flatten(x, 1)))


class Fire(nn.Module):
    def __init__(self, before: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(before, squeeze, 1)
        self.expand1x1 = nn.Conv2d(squeeze, expand, 1)
        self.expand3x3 = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.expand1x1(x)), F.relu(self.expand3x3(x))], 1)


class SqueezeNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4 * width, 3, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, ceil_mode=True),
            Fire(4 * width, width, 4 * width), Fire(8 * width, width, 4 * width), nn.MaxPool2d(3, 2, ceil_mode=True),
            Fire(8 * width, 2 * width, 8 * width),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Conv2d(16 * width, 10, 1), nn.ReLU(True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.classifier(self.features(x))
        return F.adaptive_avg_pool2d(x, 1).view(x.shape[0], 10)


class DoubleConv(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inc, self.down1, self.down2 = (
            DoubleConv(1, width),
            DoubleConv(width, 2 * width),
            DoubleConv(2 * width, 4 * width),
        )
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.conv1, self.conv2 = DoubleConv(4 * width, 2 * width), DoubleConv(2 * width, width)
        self.up2 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.outc = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x3 = self.down2(F.max_pool2d(x2, 2))
        x = self.conv1(_beside(x2, self.up1(x3)))
        x = self.conv2(_beside(x1, self.up2(x)))
        return self.outc(x)


def _beside(skip: Tensor, x: Tensor) -> Tensor:
    # Sizes may differ by the pixels that pooling has dropped.
    rows, cols = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
    x = F.pad(x, [cols // 2, cols - cols // 2, rows // 2, rows - rows // 2])
    return torch.cat([skip, x], dim=1)


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-2)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(1e-2 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.dwconv(x).permute(0, 2, 3, 1)
        x = self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        x = self.gamma * x
        return shortcut + x.permute(0, 3, 1, 2)


class ChannelsFirstNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, 1e-2).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 4, stride=4), ChannelsFirstNorm(width))
        self.stage1 = nn.Sequential(ConvNeXtBlock(width), ConvNeXtBlock(width))
        self.down = nn.Sequential(ChannelsFirstNorm(width), nn.Conv2d(width, 2 * width, 2, stride=2))
        self.stage2 = nn.Sequential(ConvNeXtBlock(2 * width), ConvNeXtBlock(2 * width))
        self.norm, self.head = nn.LayerNorm(2 * width, eps=1e-2), nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage2(self.down(self.stage1(self.stem(x))))
        return self.head(self.norm(x.mean([-2, -1])))


class SqueezeExcitation(nn.Module):
    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = F.adaptive_avg_pool2d(x, 1)
        scale = self.expand(F.silu(self.reduce(scale)))
        return x * torch.sigmoid(scale)


class MBConv(nn.Module):
    """EfficientNet's block between a stem and a head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        hidden = 4 * width
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.expand = nn.Sequential(nn.Conv2d(width, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.SiLU())
        depthwise = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False)
        self.depthwise = nn.Sequential(depthwise, nn.BatchNorm2d(hidden), nn.SiLU())
        self.attention = SqueezeExcitation(hidden, width // 4 or 1)
        self.project = nn.Sequential(nn.Conv2d(hidden, width, 1, bias=False), nn.BatchNorm2d(width))
        self.fc = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.project(self.attention(self.depthwise(self.expand(x))))
        return self.fc(x.mean((2, 3)))


class EncoderBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-2), nn.LayerNorm(dim, eps=1e-2)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.heads = heads

    def attention(self, x: Tensor) -> Tensor:
        b, n, dim = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2, depth: int = 1, side: int = 16, patch: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, width))
        self.blocks = nn.Sequential(*[EncoderBlock(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width, eps=1e-2), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


# By name: constructor, the shape of one input, and arguments that give the width of a test.
_TWELVE: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "LeNet": (LeNet, (1, 28, 28), (2,)),
    "VGG-11": (Vgg11, (3, 32, 32), (4,)),
    "ResNet-18": (partial(ResNet, BasicBlock, (2, 2, 2, 2)), (3, 32, 32), (4,)),
    "ResNet-50": (partial(ResNet, Bottleneck, (3, 4, 6, 3)), (3, 32, 32), (2,)),
    "WRN-16-4": (WideResNet, (3, 32, 32), (2,)),
    "DenseNet": (DenseNet, (3, 32, 32), (2, 3)),
    "MobileNetV2": (MobileNetV2, (3, 32, 32), (4,)),
    "SqueezeNet": (SqueezeNet, (3, 32, 32), (2,)),
    "U-Net": (UNet, (1, 32, 32), (3,)),
    "ConvNeXt": (ConvNeXt, (3, 32, 32), (4,)),
    "EfficientNet block": (MBConv, (3, 16, 16), (4,)),
    "ViT": (ViT, (3, 16, 16), (8,)),
}
NETWORKS = {name: (make, shape) for name, (make, shape, _) in _TWELVE.items()}
"""Name to constructor and the shape of one input."""

SMALL = {name: partial(make, *width) for name, (make, _, width) in _TWELVE.items()}
"""The same networks at the width of a test."""

ON_A_BOX = ("EfficientNet block", "ViT")
"""Those that have a Lipschitz constant on a box only."""
