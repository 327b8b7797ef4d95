from tests.docs.excerpts import Excerpts, made

page = Excerpts("docs/index.md")
page.text("bash")  # installs the package: test_package.py has that
made(page.text("bash").splitlines()[0])  # and "source .venv/bin/activate"
page.end()
