//! A TCP door in front of the private server's socket that does what networks and dying servers do: it holds bytes back in one direction
//! or both while the sockets stay open, ends connections in good order, refuses new ones, or answers that the server is starting up.
//!
//! The rule: what is done to a connection is done to those that exist, and the door decides about those that come. So a test can cut one
//! session and leave its successor alone, or the other way round. A connection that has sent LISTEN is known as a listener.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::watch;

/// What happens to connections that come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Door {
    /// They pass.
    #[default]
    Open,
    /// They are refused: nobody listens.
    Shut,
    /// They are told that the server is starting up (57P03), and closed.
    Starting,
    /// They are accepted, and nothing more is heard of them.
    Silent,
}

/// What happens to the bytes of a connection that exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flow {
    /// They pass.
    #[default]
    Pass,
    /// None passes. The sockets stay open.
    Hold,
    /// What the client says does not arrive.
    HoldToServer,
    /// What the server says does not arrive.
    HoldToClient,
    /// Both ends are closed in good order.
    Close,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    ToServer,
    ToClient,
}

impl Flow {
    fn holds(self, way: Way) -> bool {
        match self {
            Self::Pass | Self::Close => false,
            Self::Hold => true,
            Self::HoldToServer => way == Way::ToServer,
            Self::HoldToClient => way == Way::ToClient,
        }
    }
}

/// One connection.
#[derive(Debug, Default)]
struct Link {
    flow: watch::Sender<Flow>,
    listens: AtomicBool,
    /// Bytes that reached the server.
    sent: AtomicU64,
    over: AtomicBool,
}

/// The door and what has come through it.
pub struct Proxy {
    address: SocketAddr,
    door: watch::Sender<Door>,
    /// The door as it stands by now.
    stands: watch::Receiver<Door>,
    links: Arc<Mutex<Vec<Arc<Link>>>>,
}

impl Proxy {
    /// Opens a door to this unix socket.
    pub async fn to(socket: PathBuf) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (door, wanted) = watch::channel(Door::Open);
        let (is, stands) = watch::channel(Door::Open);
        let links = Arc::default();
        tokio::spawn(serve(listener, socket, (wanted, is), Arc::clone(&links)));
        Ok(Self { address, door, stands, links })
    }

    /// Where the door is.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Opens or closes the door; returns when it is so.
    pub async fn set(&self, door: Door) {
        self.door.send_replace(door);
        let _ = self.stands.clone().wait_for(|stands| *stands == door).await;
    }

    /// From now on nothing passes through the connections that exist.
    pub fn hold_all(&self) {
        self.all(Flow::Hold);
    }

    /// What becomes of the connections that exist.
    pub fn all(&self, flow: Flow) {
        for link in self.living() {
            link.flow.send_replace(flow);
        }
    }

    /// The same for those that listen; how many there are. One that is held already is not counted again: nobody hears its end.
    pub fn listeners(&self, flow: Flow) -> usize {
        let mut listeners = self.living();
        listeners.retain(|link| link.listens.load(Ordering::Relaxed) && *link.flow.borrow() == Flow::Pass);
        for link in &listeners {
            link.flow.send_replace(flow);
        }
        listeners.len()
    }

    /// Listeners that live, and those there ever were.
    pub fn listened(&self) -> (usize, usize) {
        let links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        let listeners = links.iter().filter(|link| link.listens.load(Ordering::Relaxed));
        let living = listeners.clone().filter(|link| !link.over.load(Ordering::Relaxed)).count();
        (living, listeners.count())
    }

    /// Bytes that listeners have sent to the server.
    pub fn sent_by_listeners(&self) -> u64 {
        let links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        let listeners = links.iter().filter(|link| link.listens.load(Ordering::Relaxed));
        listeners.map(|link| link.sent.load(Ordering::Relaxed)).sum()
    }

    fn living(&self) -> Vec<Arc<Link>> {
        let links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.iter().filter(|link| !link.over.load(Ordering::Relaxed)).cloned().collect()
    }
}

async fn serve(
    listener: TcpListener,
    socket: PathBuf,
    (mut wanted, is): (watch::Receiver<Door>, watch::Sender<Door>),
    links: Arc<Mutex<Vec<Arc<Link>>>>,
) {
    let address = listener.local_addr().expect("the address of the door");
    let mut listener = Some(listener);
    let mut silenced = Vec::new();
    loop {
        let door = *wanted.borrow_and_update();
        if door == Door::Shut {
            listener = None;
        } else if listener.is_none() {
            listener = Some(TcpListener::bind(address).await.expect("the same address again"));
        }
        is.send_replace(door);
        let Some(open) = &listener else {
            let Ok(()) = wanted.changed().await else { return };
            continue;
        };
        let client = tokio::select! {
            changed = wanted.changed() => if changed.is_ok() { continue } else { return },
            accepted = open.accept() => if let Ok((client, _)) = accepted { client } else { continue },
        };
        match door {
            Door::Open => {
                // Without a server behind it, the connection is closed as a dying server would.
                let Ok(server) = UnixStream::connect(&socket).await else { continue };
                let link = Arc::<Link>::default();
                links.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&link));
                join(client, server, link);
            }
            Door::Starting => drop(tokio::spawn(say_starting_up(client))),
            Door::Silent | Door::Shut => silenced.push(client),
        }
    }
}

fn join(client: TcpStream, server: UnixStream, link: Arc<Link>) {
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    let there = carry(from_client, to_server, Arc::clone(&link), Way::ToServer);
    let back = carry(from_server, to_client, Arc::clone(&link), Way::ToClient);
    tokio::spawn(async move {
        tokio::join!(there, back);
        link.over.store(true, Ordering::Relaxed);
    });
}

/// Ends with its half closed: the other end reads the end of the stream.
async fn carry(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, link: Arc<Link>, way: Way) {
    let mut flow = link.flow.subscribe();
    let mut bytes = vec![0; 16 * 1024];
    loop {
        let now = *flow.borrow_and_update();
        if now == Flow::Close {
            return;
        }
        if now.holds(way) {
            // The link itself holds the sender: this ends with the runtime at the latest.
            let _ = flow.changed().await;
            continue;
        }
        let read = tokio::select! {
            biased;
            _ = flow.changed() => continue,
            read = from.read(&mut bytes) => read,
        };
        let count = match read {
            Ok(0) | Err(_) => return,
            Ok(count) => count,
        };
        if way == Way::ToServer {
            if bytes[..count].windows(8).any(|word| word == b"LISTEN \"") {
                link.listens.store(true, Ordering::Relaxed);
            }
            link.sent.fetch_add(count as u64, Ordering::Relaxed);
        }
        if to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

/// The answer of a server that recovers: an `ErrorResponse` of severity FATAL, then the end.
async fn say_starting_up(mut client: TcpStream) -> io::Result<()> {
    let length = client.read_i32().await?;
    let mut startup = vec![0; usize::try_from(length - 4).unwrap_or_default().min(16 * 1024)];
    client.read_exact(&mut startup).await?;
    let fields = b"SFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0\0";
    client.write_u8(b'E').await?;
    client.write_i32(4 + fields.len() as i32).await?;
    client.write_all(fields).await?;
    client.shutdown().await
}
