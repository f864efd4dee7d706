"""What the doctor's tests do to the hosts of a lab, undone again; and the doctor's answer."""

import json
import sys
from contextlib import contextmanager

from lab import Lab
from launching import ROOT

DOCTOR = [sys.executable, "-m", "hvtrain", "doctor"]
HOSTS = ["-H", "s1:2,s2:2,s3:2"]


class DoctorLab(Lab):
    """Hosts s1 ... sN, and the doctor on s1."""

    def shell(self, host, text):
        self("exec", host, "sh", "-c", text)

    @contextmanager
    def changed(self, *changes):
        """Shell lines on hosts as (host, do, undo), undone at the end whatever happened."""
        undo = []
        try:
            for host, do, back in changes:
                self.shell(host, do)
                undo.append((host, back))
            yield
        finally:
            for host, back in reversed(undo):
                self.shell(host, back)

    @contextmanager
    def net(self, *command, back):
        """`scripts/lab net WORDS` for a while; back: the words that end it."""
        self("net", *command)
        try:
            yield
        finally:
            self("net", command[0], back)

    def attempt(self, *options, cwd=ROOT, path="", packages=""):
        """The finished doctor on s1. path: a folder before all others in which s1 finds programs; packages: in which
        Python on all hosts finds packages, besides."""
        prefix = ["env", f"PATH={path}:/usr/bin:/bin"] if path else []
        prefix += ["env", f"PYTHONPATH={packages}"] if packages else []
        return self("exec", "s1", *prefix, *DOCTOR, *options, check=False, cwd=cwd)

    def report(self, *options, **places):
        """The doctor's JSON object."""
        done = self.attempt(*options, "--json", **places)
        assert done.returncode in (0, 1), (done.stdout, done.stderr)
        report = json.loads(done.stdout)
        assert done.stdout.count("\n") == 1
        assert report["passed"] is (done.returncode == 0)
        return report

    def failures(self, *options, **places):
        """{(check, host): found} of the rows that failed. All of them name a fix."""
        report = self.report(*HOSTS, "--no-links", *options, **places)
        assert all(row["fix"] for row in report["rows"] if row["status"] == "FAIL")
        return {
            (row["check"], row["host"]): row["finding"]
            for row in report["rows"]
            if row["status"] == "FAIL"
        }


def over(host, changed, original):
    """Another file in the place of one, on one host only: each has its own mounts."""
    return host, f"mount --bind {changed} {original}", f"umount {original}"


def emptied(host, folder, size="1m"):
    return host, f"mount -t tmpfs -o size={size} tmpfs {folder}", f"umount {folder}"


def login(host, text):
    """What logins by ssh run first on a host; a shell as Debian builds it reads this file."""
    return host, f"cat > ~/.bashrc <<'END'\n{text}\nEND", "rm ~/.bashrc"


def names(host, *lines):
    """The host's own /etc/hosts, in which a later line for a name is not read."""
    text = "127.0.0.1 localhost\n" + "\n".join(lines)
    return (
        host,
        f"cp /etc/hosts /run/hosts; cat > /etc/hosts <<'END'\n{text}\nEND",
        "cat /run/hosts > /etc/hosts",
    )


RIGHT = {f"s{number}": f"10.213.0.{number} s{number}" for number in (1, 2, 3)}
