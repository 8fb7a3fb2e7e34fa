"""``p2pdiloco.DiLoCo`` as a callback of other libraries' trainers. Each module needs its library."""
