"""DINO (Caron 2021): a student sees two large and four small crops, a teacher, its average, the large ones; centring,
sharpening, a weight-normalized last layer; features are judged by their nearest neighbours."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from timm.models import VisionTransformer
from torch import Tensor, nn
from torchvision.transforms import v2

from tests.training_scripts.data import discs
from tests.training_scripts.runner import Run

CLASSES, LARGE, SMALL, BATCH, EPOCHS, PROTOTYPES = 4, 32, 16, 8, 3, 32


class Dino(nn.Module):
    """A vision transformer for images of any size, and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = VisionTransformer(
            img_size=LARGE, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=0, dynamic_img_size=True
        )
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(16, PROTOTYPES, bias=False))
        self.last.parametrizations.weight.original0.data.fill_(1)
        self.last.parametrizations.weight.original0.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, PROTOTYPES] of images [N, 3, H, W]."""
        return self.last(F.normalize(self.mlp(self.backbone(images)), dim=1))


class DinoLoss(nn.Module):
    center: Tensor

    def __init__(self, student: float = 0.4, teacher: float = 0.2, momentum: float = 0.9) -> None:
        super().__init__()
        self.student, self.teacher, self.momentum = student, teacher, momentum
        self.register_buffer("center", torch.zeros(1, PROTOTYPES))

    def forward(self, students: list[Tensor], teachers: Tensor) -> Tensor:
        """Cross entropy [] over all pairs of crops but those of one crop with itself; updates the centre."""
        wanted = F.softmax((teachers - self.center) / self.teacher, 1).detach().chunk(2)
        found = [F.log_softmax(logits / self.student, 1) for logits in students]
        losses = [-(p * q).sum(1).mean() for i, p in enumerate(wanted) for j, q in enumerate(found) if i != j]
        with torch.no_grad():
            self.center.mul_(self.momentum).add_(teachers.mean(0, keepdim=True), alpha=1 - self.momentum)
        return torch.stack(losses).mean()


def main(run: Run) -> None:
    torch.manual_seed(0)
    images, labels, _ = discs(40, LARGE, CLASSES)
    large = v2.Compose([v2.RandomResizedCrop(LARGE, (0.5, 1.0)), v2.RandomHorizontalFlip()])
    small = v2.Compose([v2.RandomResizedCrop(SMALL, (0.2, 0.5)), v2.RandomHorizontalFlip()])
    student = run.to(Dino())
    teacher = copy.deepcopy(student).requires_grad_(False)
    loss_of = run.to(DinoLoss())
    run.track(student=student, teacher=teacher, loss=loss_of)
    student_run, teacher_run, criterion = run.compile(student), run.compile(teacher), run.compile(loss_of)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-4, eps=1e-5)
    steps, step = EPOCHS * len(images) // BATCH, 0
    for epoch in range(EPOCHS):
        for batch in images[torch.randperm(len(images))].split(BATCH):
            globals_ = torch.cat([torch.stack([large(x) for x in batch]) for _ in range(2)])
            locals_ = torch.cat([torch.stack([small(x) for x in batch]) for _ in range(4)])
            with run.autocast():
                with torch.no_grad():
                    teachers = teacher_run(run.to(globals_))
                students = [*student_run(run.to(globals_)).chunk(2), *student_run(run.to(locals_)).chunk(4)]
                loss = criterion([s.float() if run.amp else s for s in students], teachers)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(student.parameters(), 3.0)
            if epoch == 0:
                for parameter in student.last.parameters():
                    parameter.grad = None
            optimizer.step()
            momentum = 1 - 0.1 * (math.cos(math.pi * step / steps) + 1) / 2
            with torch.no_grad():
                for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                    mine.mul_(momentum).add_(theirs, alpha=1 - momentum)
            run.log(loss=loss, norm=norm)
            step += 1

    held_out, targets, _ = discs(16, LARGE, CLASSES, seed=1)
    backbone = run.compile(teacher.backbone.eval())
    with torch.no_grad(), run.autocast():
        bank, queries = (F.normalize(backbone(run.to(x)).float(), dim=1) for x in (images, held_out))
    votes = labels[(queries @ bank.T).topk(5, 1).indices]
    found = F.one_hot(votes, CLASSES).sum(1).argmax(1)
    run.log(similarity=queries @ bank.T)
    run.score(len(targets), accuracy=(found == targets).float().mean())
