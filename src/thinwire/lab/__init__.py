"""Networks emulated on one machine, and the launcher of workers in them. Linux, no torch."""

from thinwire.lab.check import LinkCheck
from thinwire.lab.host import Counters
from thinwire.lab.job import Job, Outcome, Patience, Process
from thinwire.lab.link import Link
from thinwire.lab.network import Lab
from thinwire.lab.output import Line

__all__ = ["Counters", "Job", "Lab", "Line", "Link", "LinkCheck", "Outcome", "Patience", "Process"]
