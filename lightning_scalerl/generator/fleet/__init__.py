"""Several engines in child processes behind the protocol of one generator (`driver=live`).

`fleet` puts the parts together: `ledger` tracks which engine has which rollout, `engines` starts and replaces them,
`transport` and `wire` carry messages to the children, `server` is the child's side, `weights` holds what was published,
and `addresses` reads `driver.engines`.
"""
