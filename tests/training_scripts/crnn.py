"""CRNN (Shi 2015): a convolutional network over lines of digits, a bidirectional LSTM over their columns, the CTC loss,
greedy decoding and the edit distance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.training_scripts.runner import Run

DIGITS, HEIGHT, COLUMNS, LONGEST, BATCH, STEPS = 5, 16, 48, 5, 6, 15


class CRNN(nn.Module):
    def __init__(self, width: int = 12, hidden: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2, 2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU(True),
            nn.MaxPool2d((2, 2), (2, 1), (0, 1)),
            nn.Conv2d(2 * width, 2 * width, (4, 2)), nn.ReLU(True),
        )  # fmt: skip
        self.recurrent = nn.LSTM(2 * width, hidden, bidirectional=True)
        self.head = nn.Linear(2 * hidden, DIGITS + 1)

    def forward(self, lines: Tensor) -> Tensor:
        """Log-probabilities [T, N, DIGITS + 1], the blank first, of lines [N, 1, HEIGHT, W]."""
        columns = self.features(lines).squeeze(2).permute(2, 0, 1)
        hidden, _ = self.recurrent(columns)
        return self.head(hidden).log_softmax(2)


def lines(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lines of glyphs [count, 1, HEIGHT, COLUMNS], digits from 1 [count, LONGEST], and their numbers [count]."""
    generator = torch.Generator().manual_seed(seed)
    glyphs = (torch.rand(DIGITS + 1, HEIGHT, 8, generator=torch.Generator().manual_seed(5)) > 0.6).float()
    glyphs[0] = 0
    lengths = torch.randint(2, LONGEST + 1, (count,), generator=generator)
    digits = torch.randint(1, DIGITS + 1, (count, LONGEST), generator=generator)
    digits.masked_fill_(torch.arange(LONGEST) >= lengths[:, None], 0)
    padded = torch.cat((digits, torch.zeros(count, 1, dtype=torch.long)), 1)
    images = glyphs[padded].permute(0, 2, 1, 3).reshape(count, 1, HEIGHT, COLUMNS)
    return images + 0.1 * torch.randn(images.shape, generator=generator), digits, lengths


def decoded(logits: Tensor) -> list[list[int]]:
    """Digits without repetitions and blanks."""
    best = logits.argmax(2).T.tolist()
    return [[d for d, last in zip(row, [0, *row], strict=False) if d and d != last] for row in best]


def edits(found: list[int], wanted: list[int]) -> int:
    """Levenshtein's distance."""
    row = list(range(len(wanted) + 1))
    for i, a in enumerate(found, 1):
        corner, row[0] = row[0], i
        for j, b in enumerate(wanted, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (a != b))
    return row[-1]


def main(run: Run) -> None:
    torch.manual_seed(0)
    images, digits, lengths = lines(BATCH * 5, 0)
    net = run.to(CRNN())
    model = run.compile(net)
    criterion = nn.CTCLoss(zero_infinity=True)
    optimizer = torch.optim.Adam(net.parameters(), 2e-3, eps=1e-4)
    run.track(net=net)
    for step in range(STEPS):
        chosen = slice(step % 5 * BATCH, (step % 5 + 1) * BATCH)
        with run.autocast():
            logits = model(run.to(images[chosen]))
        times = torch.full((BATCH,), len(logits), dtype=torch.long)
        targets = torch.cat([row[:n] for row, n in zip(digits[chosen], lengths[chosen].tolist(), strict=True)])
        loss = criterion(logits if logits.dtype is torch.float64 else logits.float(), targets, times, lengths[chosen])
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        run.log(loss=loss, norm=norm)

    net.eval()
    held_out, digits, lengths = lines(4, 1)
    with torch.no_grad(), run.autocast():
        logits = model(run.to(held_out))
    pairs = zip(decoded(logits), digits.tolist(), lengths.tolist(), strict=True)
    run.log(logits=logits)
    run.score(int(lengths.sum()), error=sum(edits(f, w[:n]) for f, w, n in pairs) / int(lengths.sum()))
