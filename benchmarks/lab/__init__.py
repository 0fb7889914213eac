"""Are the instruments right: the links of the lab, the figures of `thinwire compare`."""
