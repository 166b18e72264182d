//! A TCP door in front of the private server's socket that can hold bytes back, as a firewall or a cut cable does: the sockets stay
//! open, and nothing comes through.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixStream};
use tokio::sync::watch;

/// The door. Connections that exist when it is closed stay closed for ever; later ones pass.
pub struct Proxy {
    address: SocketAddr,
    generation: watch::Sender<u64>,
}

impl Proxy {
    /// Opens a door to this unix socket.
    pub async fn to(socket: PathBuf) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (generation, held) = watch::channel(0);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = UnixStream::connect(&socket).await else { continue };
                let born = *held.borrow();
                let ((from_client, to_client), (from_server, to_server)) =
                    (client.into_split(), server.into_split());
                tokio::spawn(carry(from_client, to_server, held.clone(), born));
                tokio::spawn(carry(from_server, to_client, held.clone(), born));
            }
        });
        Ok(Self { address, generation })
    }

    /// Where the door is.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on nothing passes through the connections that exist.
    pub fn hold_all(&self) {
        self.generation.send_modify(|generation| *generation += 1);
    }
}

async fn carry(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut held: watch::Receiver<u64>,
    born: u64,
) {
    let mut bytes = vec![0; 16 * 1024];
    loop {
        let read = tokio::select! {
            _ = held.wait_for(|generation| *generation != born) => break,
            read = from.read(&mut bytes) => read,
        };
        match read {
            Ok(0) | Err(_) => return,
            Ok(count) if to.write_all(&bytes[..count]).await.is_err() => return,
            Ok(_) => {}
        }
    }
    // Both halves stay open until the door itself is gone.
    std::future::pending::<()>().await;
}
