//! Renewing leases, handing back what nobody holds, and knowing what comes due next.

mod common;
#[path = "common/work.rs"]
mod work;

#[path = "renew/claims.rs"]
mod claims;
#[path = "renew/leases.rs"]
mod leases;
#[path = "renew/unheld.rs"]
mod unheld;
