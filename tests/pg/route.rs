//! The way that producers ring, by which the gate is proven: through the pool, through a pooler, to whoever listens in the same database.

use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::timeout;
use workpump_actors::port::{Notification, ProducersRoute, StoreError};

use super::{config, connect};
use crate::common::{self, Bouncer};
use crate::pg::pool::StatementPool;
use crate::pg::producers_route::PgProducersRoute;

const SOON: Duration = Duration::from_secs(20);

fn route(url: &str) -> PgProducersRoute {
    PgProducersRoute::new(std::sync::Arc::new(StatementPool::new(&config(url), Handle::current())))
}

#[tokio::test]
async fn what_is_rung_by_the_route_is_heard_on_a_direct_session_and_is_not_its_own() {
    let db = common::database().await;
    let (session, mut heard) = connect(db.url()).await.unwrap();
    let odd = "An \"odd\" one".to_owned();
    session.listen(vec![odd.clone()]).await.unwrap();
    let mut routes = vec![route(db.url())];
    let bouncer = Bouncer::in_front_of(&common::shared().postgres, 2).await;
    routes.extend(bouncer.iter().map(|bouncer| route(&bouncer.url(db.name()))));
    for (n, route) in routes.iter().enumerate() {
        let payload = format!("probe {n}'; drop");
        route.ring(odd.clone(), payload.clone()).await.unwrap();
        let wanted = Notification { channel: odd.clone(), payload, own: false };
        assert_eq!(timeout(SOON, heard.recv()).await.unwrap(), Some(wanted));
    }
}

#[tokio::test]
async fn what_is_rung_in_another_database_is_not_heard() {
    let (db, other) = (common::database().await, common::database().await);
    let (session, mut heard) = connect(db.url()).await.unwrap();
    session.listen(vec!["a".to_owned()]).await.unwrap();
    route(other.url()).ring("a".to_owned(), "theirs".to_owned()).await.unwrap();
    route(db.url()).ring("a".to_owned(), "ours".to_owned()).await.unwrap();
    let first = timeout(SOON, heard.recv()).await.unwrap().expect("open");
    assert_eq!(first.payload, "ours");
}

#[tokio::test]
async fn a_route_that_leads_nowhere_says_so() {
    let error = route("postgresql://postgres@127.0.0.1:1/x").ring("a".to_owned(), String::new()).await;
    let error = error.expect_err("nobody there");
    assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
}
