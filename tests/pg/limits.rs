//! Start-up options: what the server keeps of them, and who refuses them.

use std::time::Duration;

use super::{config, connect, value};
use crate::common::{self, Bouncer};
use crate::pg::direct::DirectClient;
use crate::pg::limits::Limits;
use workpump_actors::port::StoreError;

const SHOWN: &str = "select string_agg(current_setting(n), ' ' order by o) from unnest(array['tcp_keepalives_idle', \
    'tcp_keepalives_interval', 'tcp_keepalives_count', 'tcp_user_timeout', 'client_connection_check_interval', \
    'statement_timeout', 'idle_session_timeout']) with ordinality as t (n, o)";

async fn shown(url: &str) -> String {
    let session =
        DirectClient::open(&config(url), Some(Duration::from_secs(5)), None).await.expect("a direct session");
    value(session.client(), SHOWN).await
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn over_tcp_the_server_shows_every_limit_back() {
    // An address of this process alone, so that no port can be taken.
    let pid = std::process::id();
    let address = format!("127.{}.{}.{}", 1 + (pid >> 16) % 250, (pid >> 8) & 255, 1 + pid % 250);
    let server = common::server_with(&[("listen_addresses", &address)]);
    let db = server.database().await;
    let url = format!("postgresql://postgres@{address}:5432/{}", db.name());
    assert_eq!(shown(&url).await, "5 2 3 10000 2s 5s 0");
    connect(&url).await.expect("a direct session");
}

#[tokio::test]
async fn on_a_unix_socket_the_limits_of_tcp_are_zero_and_that_is_no_pooler() {
    let db = common::database().await;
    assert_eq!(shown(db.url()).await, "0 0 0 0 2s 5s 0");
    connect(db.url()).await.expect("a direct session");
}

#[tokio::test]
async fn limits_win_over_the_database_and_leave_other_options_of_the_url_alone() {
    let db = common::database().await;
    let control = db.connect().await;
    super::run(
        &control,
        &format!("alter database {} set statement_timeout = '1s'; alter database {0} set idle_session_timeout = '1s'", db.name()),
    )
    .await;
    let url = format!("{}?options=-c%20work_mem%3D123kB", db.url());
    assert_eq!(shown(&url).await, "0 0 0 0 2s 5s 0");
    let session = DirectClient::open(&config(&url), None, None).await.expect("a direct session");
    assert_eq!(value::<String>(session.client(), "show statement_timeout").await, "0");
    assert_eq!(value::<String>(session.client(), "show work_mem").await, "123kB");
}

#[tokio::test]
async fn a_setting_the_server_does_not_know_or_cannot_change_is_left_out_and_the_rest_is_kept() {
    let db = common::database().await;
    let mut limits = Limits::new(Some(Duration::from_secs(7)));
    limits.add("setting_of_a_later_version", "1");
    limits.add("shared_buffers", "1MB");
    limits.add("client_connection_check_interval", "-7");
    let wanted = limits.taken().len();
    let (client, connection) = limits.connect(&config(db.url())).await.expect("a session");
    tokio::spawn(connection);
    assert_eq!(value::<String>(&client, "show statement_timeout").await, "7s");
    // Both of that name: which of them was meant, the server does not say.
    assert_eq!(limits.taken().len(), wanted - 4, "{:?}", limits.taken());
}

#[tokio::test]
async fn an_error_that_is_no_matter_of_limits_stays_what_it_is() {
    let db = common::database().await;
    let error = connect(&db.url_as("nobody_of_that_name")).await.err().expect("no such role");
    assert!(matches!(&error, StoreError::Other { code, .. } if code == "28000"), "{error}");
    let error = connect(&db.url().replace(db.name(), "no_such_database")).await.err().expect("no database");
    assert!(matches!(&error, StoreError::Other { code, .. } if code == "3D000"), "{error}");
}

#[tokio::test]
async fn a_pooler_is_refused_whether_it_refuses_the_options_or_swallows_them() {
    let db = common::database().await;
    let server = &common::shared().postgres;
    for (settings, reason) in [
        ("", "start-up options are refused (unsupported startup parameter: options (08P01))"),
        ("ignore_startup_parameters = options", "start-up options do not reach the server"),
    ] {
        let Some(bouncer) = Bouncer::with_settings(server, 5, settings).await else { return };
        let error = connect(&bouncer.url(db.name())).await.err().expect("a pooler");
        assert!(matches!(error, StoreError::NotDirect(_)));
        let text = error.to_string();
        assert_eq!(
            text,
            format!("not a direct connection: {reason}; set a direct URL that leads past the pooler")
        );
        assert!(!error.is_transient());
    }
}
