"""Integer programs: built, solved by HiGHS, CBC or Gurobi, and searched best first."""
