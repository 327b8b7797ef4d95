"""README.md: the script that a user changes, before and after, and the first run from a file."""

from pathlib import Path

from tests.docs.excerpts import Excerpts, shell

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

visits = [(user, (31 * user + 7 * time) % 500, time) for user in range(400) for time in range(4 + user % 90)]
Path("ratings.csv").write_text("user,item,time\n" + "".join(f"{user},{item},{time}\n" for user, item, time in visits))
Path("train.py").write_text(page.text("python"))
assert "Verdict" in page.bash()
page.end()
