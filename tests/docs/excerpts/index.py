"""docs/install.md and docs/index.md: commands of make exist."""

from tests.docs.excerpts import Excerpts, made

page = Excerpts("docs/install.md")
for _ in range(2):
    page.text("bash")  # installs the package: test_package.py has that
made(page.text("bash"))
page.end()
page = Excerpts("docs/index.md")
page.text("diff")
page.end()
