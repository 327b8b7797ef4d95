"""README.md: the script that a user changes, before and after; the first run; commands of make have to be there."""

from pathlib import Path

from tests.docs.excerpts import Excerpts, made, shell

PROLOGUE = """
import lightning as L
from quick_start import Histories, Recommender, collate
from torch.utils.data import DataLoader

train_set = Histories(1024)
history_lengths = train_set.lengths
model = Recommender()
"""

page = Excerpts("README.md")
diff = page.text("diff").replace("devices=8", "devices=2, accelerator='cpu', max_epochs=1, logger=False")
for sign, script in (("-", "before.py"), ("+", "after.py")):
    lines = [line[1:] for line in diff.splitlines() if line[:1] in (" ", sign)]
    Path(script).write_text(PROLOGUE + "\n".join(lines) + "\n")
shell("python before.py")
assert "straggler wait" in shell("python after.py")

for _ in range(2):
    page.text("bash")  # installs the package: test_package.py has that

Path("train.py").write_text(page.text("python"))
assert "straggler wait" in page.bash()

made(page.text("bash"))
page.end()
