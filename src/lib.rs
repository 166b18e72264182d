//! A reliable work pump for actix services on PostgreSQL.
